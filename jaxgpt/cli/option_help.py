"""The help of options: full names of settings, and the values of a preset as their defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel
from rich.console import ConsoleOptions

from jaxgpt.cli.options import option_name, shown_default
from jaxgpt.config import Config, flat


class PresetHelp:
    """Prints panels of options with the full names of settings only, and the values of a preset as their defaults."""

    def __init__(self, base: Config) -> None:
        self.defaults = {option_name(setting): shown_default(value) for setting, value in flat(base).items()}
        self.formatter = DefaultFormatter()

    def __call__(self, console: Any, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel."""
        entries = [self._entry(entry) for entry in panel.entries]
        self.formatter(console, options, panel.copy(entries=entries))

    def render_usage(self, console: Any, options: ConsoleOptions, usage: Any) -> None:
        """Print the usage line."""
        self.formatter.render_usage(console, options, usage)

    def render_description(self, console: Any, options: ConsoleOptions, description: Any) -> None:
        """Print the docstring of a command."""
        self.formatter.render_description(console, options, description)

    def _entry(self, entry: HelpEntry) -> HelpEntry:
        """Return an entry of the help with full names and the default of the preset."""
        name = next(iter(entry.positive_names), "")
        if name not in self.defaults:
            return entry
        return entry.copy(
            positive_names=full_names(entry.positive_names),
            negative_names=full_names(entry.negative_names),
            default=self.defaults[name],
        )


def full_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of an option without the short names of a setting."""
    names = tuple(names)
    dotted = tuple(name for name in names if "." in name)
    return dotted or names
