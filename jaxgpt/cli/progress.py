"""Progress of long commands on standard error: after a short delay, the current activity and its duration."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

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
        return ", ".join(self.texts())

    def texts(self) -> list[str]:
        """Return the name, the share that is done, and the elapsed and remaining time, if they are known."""
        elapsed = time.monotonic() - self.started
        left = elapsed * (self.total - self.done) / self.done if 0 < self.done < self.total else 0.0
        share = [f"{self.done / self.total:.0%}"] if self.total else []
        return [
            self.name,
            *share,
            duration(elapsed),
            *([f"{duration(left)} left"] if 0 < self.done < self.total else []),
        ]


@contextmanager
def progress(name: str, shown: bool = True) -> Iterator[Activity]:
    """Show the progress of the block on standard error if it takes longer than `DELAY` seconds and `shown` is true.

    On a terminal this is one line, updated in place and erased at the end; otherwise, a plain line every `EVERY` seconds.
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


def live_line(console: Console, line: Callable[[], tuple[Sequence[str], float]]) -> Live:
    """Return a line that a terminal updates in place, and erases at the end.

    Args:
        console: writes to the terminal.
        line: returns the texts of the line, and the length of the bar after the first text, from 0 (no bar) to 1.
    """
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    spinner = Spinner("dots")

    def render() -> RenderableType:
        (first, *rest), share = line()
        grid = Table.grid(padding=(0, 1))
        width = console.width - len("* ") - len(first) - sum(len(f"  {text}") for text in rest) - 1
        bar = [ProgressBar(1.0, share, width=min(width, 16))] if share and width >= 4 else []
        grid.add_row(spinner, first, *bar, Text("  ".join(rest), no_wrap=True, overflow="ellipsis"))
        return grid

    # By default rich would redirect standard output to a console that writes to standard error.
    out = not console.stderr
    return Live(get_renderable=render, console=console, transient=True, refresh_per_second=4, redirect_stdout=out)


def _show(activity: Activity, ended: threading.Event) -> None:
    if ended.wait(DELAY) or sys.stderr is None:  # `2>&-` closes it, and print would fall back to standard output
        return
    from jaxgpt.cli.console import Console  # imported late: quick commands do not need it

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with live_line(console, lambda: (activity.texts(), activity.done / max(activity.total, 1))):
            ended.wait()
        return
    with suppress(OSError):  # standard error was closed
        while not ended.wait(EVERY):
            print(f"jaxgpt: {activity}", file=sys.stderr, flush=True)
