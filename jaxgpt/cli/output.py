"""Terminal output: results as JSON or text in columns, notes, and a progress line."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from json import dumps
from typing import TYPE_CHECKING, Any

import rich.console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from jaxgpt.progress import Progress

if TYPE_CHECKING:
    from jaxgpt.lm import LM

Facts = Mapping[str, str | Sequence[str]]  # lines of text, keyed by label; empty lines are not printed

ERROR_OF_DATA = "+- is the standard error over windows of text, excluding variation between seeds"
ERROR_OF_PAIRS = "+- is the standard error over pairs, excluding variation between seeds"
DELAY = 2.0  # seconds before a command shows progress on a terminal
EVERY = 10.0  # seconds between progress lines without a terminal


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(dumps(value, allow_nan=False))


def finite_or_none(value: float) -> float | None:
    """Return a number, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def print_result(json: bool, values: dict[str, Any], text: str | Facts) -> int:
    """Print the result of a command as JSON, as text or as `aligned` facts; return the exit code 0."""
    if json:
        print_json(values)
    else:
        print(text if isinstance(text, str) else aligned(text))
    return 0


def aligned(facts: Facts) -> str:
    """Format labels and lines in two columns; skip empty lines."""
    rows = []
    width = max(map(len, facts), default=0)
    for label, value in facts.items():
        lines = [value] if isinstance(value, str) else value
        for number, line in enumerate(filter(None, lines)):
            rows.append(f"{'' if number else label:<{width}}  {line}")
    return "\n".join(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column is left-aligned, the other columns are right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([f"{name:<{first}}", *padded]).rstrip())
    return "\n".join(lines)


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
            self.on_broken_pipe()
            if not self.stderr:
                note(f"cannot print: {e.strerror}; continuing without output")

    def on_broken_pipe(self) -> None:
        """Stop printing but keep working when the reader closes the pipe, as in `jaxgpt train | head`."""
        self.quiet = True
        stream = sys.stderr if self.stderr else sys.stdout
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def note(text: str) -> None:
    """Print a line on standard error, separate from machine-readable output."""
    Console(stderr=True).write(f"jaxgpt: {text}")


def note_sampling(lm: LM, given: Collection[str], unused: Collection[str] = ()) -> None:
    """Print one line with the model's recommended sampling settings, except settings in `given` and `unused`."""
    from jaxgpt.lm.defaults import sampling_defaults

    line = sampling_defaults(lm.tokenizer).note({*given, *unused})
    if line:
        note(line)


@contextmanager
def progress(name: str) -> Iterator[Progress]:
    """Show the progress of the block on standard error, after `DELAY` seconds.

    Nothing is written to standard output, which may hold the JSON of `--json`. Do not nest blocks; use `Progress.stage`.
    """
    activity = Progress(name)
    with line_shown(activity.__str__, Console(stderr=True), DELAY):
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
