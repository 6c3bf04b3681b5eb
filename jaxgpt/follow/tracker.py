"""The interface of trackers, which store and show the metrics of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Row(NamedTuple):
    """The numbers of a line of metrics.jsonl.

    Attributes:
        step: index of the train step, from 0; for an evaluation, the number of steps taken.
        values: finite numbers, keyed by their names in metrics.jsonl.
        time: seconds since 1970, computed from the start of the run and `elapsed_seconds`.
        order: position in the run: 2 * step for an evaluation, 2 * step + 1 for a train step.
    """

    step: int
    values: dict[str, float]
    time: float
    order: int


class Page(NamedTuple):
    """The page of a run in a tracker: its name, id and settings.

    Attributes:
        run: name of the directory of the run.
        id: a name that is different for every run, and equal for all followers of a run.
        settings: settings of the run, keyed by dotted name (`jaxgpt.follow.sent_settings.settings_to_send`).
        directory: RUN/trackers/NAME, for files of the tracker.
    """

    run: str
    id: str
    settings: dict[str, Any]
    directory: Path


class Tracker(Protocol):
    """Receives the rows of one run, in the process of the follower. An exception ends the follower, and is printed in one line.

    Attributes:
        name: name of the directory in RUN/trackers.
        at_once: maximum number of rows per call of `send`. If a follower is killed during a call, the next follower sends these
            rows again.
    """

    name: str
    at_once: int

    def open(self, page: Page, mark: str) -> int | None:
        """Open a new page, or continue a page that an earlier follower has opened.

        Args:
            page: name, id and settings of the run in the tracker.
            mark: the last result of `send` for this page; "": nothing was sent.

        Returns:
            The highest `order` that the tracker has stored; None: all rows that were sent.
        """
        ...

    def send(self, rows: Sequence[Row]) -> str:
        """Send rows of ascending `order`; return the `mark` for the `open` of the next follower."""
        ...

    def close(self, status: str) -> str:
        """Record the end of the run (finished, stopped, failed or killed); return a URL or command to view the page."""
        ...
