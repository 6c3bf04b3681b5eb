"""The terminal: text that users wrote or models generated is printed as it is."""

from __future__ import annotations

import os
import sys

import rich.console
from rich.console import ConsoleOptions, RenderResult
from rich.segment import Segment


class Console(rich.console.Console):
    """A rich console that interprets nothing in a string: no markup, no emoji codes, no highlighting, no wrapping."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Print a line, with its tabs and control characters, above whatever is live."""
        self.print(_Verbatim(text + "\n"), end="")

    def on_broken_pipe(self) -> None:
        """Print nothing more once the reader has gone away, as in `jaxgpt train | head`; the work goes on."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (sys.stderr if self.stderr else sys.stdout).fileno())
        os.close(null)


class _Verbatim:
    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.text)
