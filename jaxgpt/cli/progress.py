"""Progress of long commands on standard error: after a short delay, the current activity and its duration."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jaxgpt.cli.console import Console

DELAY = 2.0  # seconds before progress is shown
EVERY = 30.0  # seconds between lines if standard error is not a terminal


class Activity:
    """The current activity of a command. Call it with (done, total), in any unit, to report progress.

    Attributes:
        name: the activity, such as "evaluating".
    """

    def __init__(self, name: str) -> None:
        self.stage(name)

    def stage(self, name: str) -> None:
        """Start the next activity and reset progress."""
        self.name, self.started = name, time.monotonic()
        self.done, self.total = 0, 0

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def __str__(self) -> str:
        parts = [self.name, f"{self.done / self.total:.0%}" if self.total else "", self.times()]
        return ", ".join(filter(None, parts))

    def times(self) -> str:
        """Format the elapsed time and, once known, the time left, as in `0:01:05, 0:04:20 left`."""
        elapsed = time.monotonic() - self.started
        if not 0 < self.done < self.total:
            return duration(elapsed)
        return f"{duration(elapsed)}, {duration(elapsed * (self.total - self.done) / self.done)} left"


@contextmanager
def progress(name: str, shown: bool = True) -> Iterator[Activity]:
    """Show the progress of the block on standard error if it takes longer than `DELAY` seconds and `shown` is true.

    On a terminal this is one line, updated in place and erased at the end; elsewhere, a plain line every `EVERY` seconds.
    Nothing is written to standard output, which may hold the JSON of `--json`. Do not nest; use `Activity.stage`.
    """
    activity, ended = Activity(name), threading.Event()
    if not shown:
        yield activity
        return
    thread = threading.Thread(target=_show, args=(activity, ended), daemon=True)
    thread.start()
    try:
        yield activity
    finally:
        ended.set()
        thread.join()


def duration(seconds: float) -> str:
    """Format seconds as `0:01:05`."""
    return str(timedelta(seconds=int(seconds)))


def _show(activity: Activity, ended: threading.Event) -> None:
    if ended.wait(DELAY) or sys.stderr is None:  # `2>&-` closes it, and print would fall back to standard output
        return
    from jaxgpt.cli.console import Console  # imported late: quick commands do not need it

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        _show_live(console, activity, ended)
        return
    with suppress(OSError):  # standard error was closed
        while not ended.wait(EVERY):
            print(f"jaxgpt: {activity}", file=sys.stderr, flush=True)


def _show_live(console: Console, activity: Activity, ended: threading.Event) -> None:
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    spinner = Spinner("dots")

    def line() -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [spinner, activity.name]
        if activity.total:
            cells += [ProgressBar(activity.total, activity.done, width=24), f"{activity.done / activity.total:4.0%}"]
        grid.add_row(*cells, activity.times())
        return grid

    # By default rich would redirect standard output to this console, which writes to standard error.
    with Live(get_renderable=line, console=console, transient=True, redirect_stdout=False):
        ended.wait()
