"""Terminal output that prints text from users and models verbatim."""

from __future__ import annotations

import sys

import rich.console
from rich.segment import Segment, Segments

from jaxgpt.cli.output import discard


class Console(rich.console.Console):
    """A rich console without markup, emoji codes, highlighting or wrapping."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Print a line verbatim, tabs and control characters included, above any live display."""
        self.print(Segments([Segment(text + "\n")]), end="")

    def on_broken_pipe(self) -> None:
        """Stop printing but keep working when the reader closes the pipe, as in `jaxgpt train | head`."""
        self.quiet = True
        discard((sys.stderr if self.stderr else sys.stdout).fileno())
