"""Progress of long work: a line that a terminal updates in place, otherwise plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from jaxgpt.cli.console import Console

DELAY = 2.0  # seconds before a command shows progress
EVERY = 10.0  # seconds between plain lines


class Activity:
    """The current activity of a command. Call it with (done, total), in any unit, to report progress."""

    def __init__(self, name: str) -> None:
        self.stage(name)

    def stage(self, name: str) -> None:
        """Start the next activity and reset progress."""
        self.name, self.started = name, time.monotonic()
        self.done, self.total = 0, 0

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def __str__(self) -> str:
        """Format the name, the share that is done, and the elapsed and remaining time, if they are known."""
        elapsed = time.monotonic() - self.started
        texts = [self.name, duration(elapsed)]
        if self.total:
            texts.insert(1, f"{self.done / self.total:.0%}")
        if 0 < self.done < self.total:
            texts.append(f"{duration(elapsed * (self.total - self.done) / self.done)} left")
        return "  ".join(texts)


@contextmanager
def progress(name: str) -> Iterator[Activity]:
    """Show the progress of the block on standard error if it takes longer than `DELAY` seconds.

    Nothing is written to standard output, which may hold the JSON of `--json`. Do not nest; use `Activity.stage`.
    """
    activity = Activity(name)
    with shown(activity.__str__, delay=DELAY):
        yield activity


@contextmanager
def shown(line: Callable[[], str], console: Console | None = None, delay: float = 0.0) -> Iterator[None]:
    """Show a line during the block: updated in place on a terminal, otherwise written every `EVERY` seconds.

    Args:
        line: returns the current line.
        console: None: standard error.
        delay: seconds before the line is shown.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(line, console, delay, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def duration(seconds: float) -> str:
    """Format seconds as `0:01:05`."""
    return str(timedelta(seconds=int(seconds)))


def _show(line: Callable[[], str], console: Console | None, delay: float, ended: threading.Event) -> None:
    if ended.wait(delay):
        return
    from jaxgpt.cli.console import Console  # imported late: quick commands do not need it

    console = console or Console(stderr=True)
    with suppress(OSError):  # the stream was closed
        if console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            with _live(line, console):
                ended.wait()
        while not ended.wait(EVERY):
            console.write(line())


def _live(line: Callable[[], str], console: Console) -> Live:
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    spinner = Spinner("dots")

    def render() -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(spinner, Text(line(), no_wrap=True, overflow="ellipsis"))
        return grid

    # By default rich would redirect standard output to a console that writes to standard error.
    out = not console.stderr
    return Live(get_renderable=render, console=console, transient=True, refresh_per_second=4, redirect_stdout=out)
