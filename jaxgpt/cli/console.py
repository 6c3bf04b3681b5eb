"""The terminal during a command: lines, notes on standard error, and a progress line."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import rich.console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from jaxgpt.progress import Progress

DELAY = 2.0  # seconds before a command shows progress
EVERY = 10.0  # seconds between progress lines without a terminal


class Console(rich.console.Console):
    """A rich console without markup, emoji codes, highlighting or wrapping."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Print a line verbatim, tabs and control characters included, above any live display.

        If the line cannot be written, for example to a full disk or a closed terminal, work continues without further lines.
        """
        try:
            self.print(Segments([Segment(text + "\n")]), end="")
        except OSError as e:
            self.discard()
            if not self.stderr:
                note(f"cannot print: {e.strerror}; continuing without output")

    def on_broken_pipe(self) -> None:
        """Keep working when the reader closes the pipe, as in `jaxgpt train | head`; rich would exit."""
        self.discard()

    def discard(self) -> None:
        """Discard all further output, including text in the buffer of the stream."""
        self.quiet = True
        stream = sys.stderr if self.stderr else sys.stdout
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def note(text: str) -> None:
    """Print a line on standard error, separate from machine-readable output."""
    Console(stderr=True).write(f"jaxgpt: {text}")


@contextmanager
def progress(name: str) -> Iterator[Progress]:
    """Show the progress of the block on standard error, after `DELAY` seconds.

    Nothing is written to standard output, which may hold the JSON of `--json`. Do not nest blocks; use `Progress.stage`.
    """
    activity = Progress(name)
    with line_shown(lambda: str(activity), Console(stderr=True), DELAY):
        yield activity


@contextmanager
def line_shown(line: Callable[[], str], console: Console, delay: float = 0.0) -> Iterator[None]:
    """Show a line during the block, after `delay` seconds.

    On a terminal, the line is updated in place; otherwise, a line is printed every `EVERY` seconds after the delay.
    """
    ended = threading.Event()

    def text() -> Text:
        return Text(line(), no_wrap=True, overflow="ellipsis")

    def show() -> None:
        if ended.wait(delay):
            return
        updates_in_place = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        with suppress(OSError):  # closed stream
            if updates_in_place:
                # By default, rich would redirect standard output to a console that writes to standard error.
                out = not console.stderr
                with Live(console=console, get_renderable=text, transient=True, redirect_stdout=out):
                    ended.wait()
            else:
                while not ended.wait(EVERY):
                    console.write(line())

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
