"""Follow a run: send the lines of its metrics.jsonl to a tracker, during the run or afterwards.

The follower is a separate process, so a tracker that fails or hangs affects only the follower. The next follower continues
after the last row that was sent.

RUN/trackers/NAME/position.json   the last row sent, and the id of the run in the tracker (position.py)
RUN/trackers/NAME/log.txt         output of a follower that `train --track` has started
RUN/trackers/NAME/.lock           locked by the follower
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from jaxgpt.checkpoint.run import Run
from jaxgpt.config import flat
from jaxgpt.directories import METRICS, TRACKERS
from jaxgpt.errors import TrainingFailed, UserError, one_line
from jaxgpt.follow.position import Position
from jaxgpt.follow.sent_settings import settings_to_send
from jaxgpt.follow.tail import Tail
from jaxgpt.follow.tracker import Page, Row, Tracker
from jaxgpt.locks import Locked, has_writer, sole_writer
from jaxgpt.trainer.metrics import how_ended

POLL = 1.0  # seconds between two reads of the file
REPLACED = "replaced"  # status of a run whose directory was renamed, deleted or replaced


class Followed(NamedTuple):
    """Result of a follower.

    Attributes:
        rows: number of rows sent.
        status: the end of the run: finished, stopped, failed, killed or replaced.
        place: URL or command to view the page of the run; "": no page was opened.
    """

    rows: int
    status: str
    place: str


def follow(path: Path, tracker: Tracker, note: Callable[[str], None] = print, poll: float = POLL) -> Followed:
    """Send the metrics of a run to a tracker until the run ends.

    A row is sent again only if a follower was killed while it sent the row, or the tracker has lost the row. If a
    different follower sends the run to the same tracker, wait until it ends.

    Args:
        path: directory of the run.
        tracker: receiver of the rows: `tracker_of(name)`, or your own.
        note: called with one-line messages.
        poll: seconds between two reads of the file.

    Raises:
        UserError: if the run has no metrics, or the position of the last follower is damaged.
        TrainingFailed: if the tracker raises an exception.
    """
    if not (path / METRICS).is_file() and has_writer(path) is False:
        raise UserError(f"{path} has no metrics.jsonl: it was imported or saved from Python; choose a trained run")
    directory = path / TRACKERS / tracker.name
    directory.mkdir(parents=True, exist_ok=True)
    with sole_follower(directory, note, poll):
        return _Follower(path, tracker, directory, poll).follow()


@contextmanager
def sole_follower(directory: Path, note: Callable[[str], None], poll: float) -> Iterator[None]:
    """Lock the directory of a tracker; wait if a different follower has locked it."""
    is_noted = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(sole_writer(directory))
                break
            except Locked as e:
                if not is_noted:
                    note(f"waiting until the other `jaxgpt follow` exits: {e}")
                is_noted = True
                time.sleep(poll)
        yield


class _Follower:
    """Sends a run to a tracker (`follow`), and records the position after every call of the tracker.

    Attributes:
        sent: number of rows sent.
        is_open: whether the page is open; it is opened at the first new row.
        position: the part of the run that the tracker has received.
    """

    def __init__(self, path: Path, tracker: Tracker, directory: Path, poll: float) -> None:
        self.path = path
        self.tracker = tracker
        self.directory = directory
        self.poll = poll
        self.sent = 0
        self.is_open = False
        self.position = Position.read(directory) or self._start()

    def _start(self) -> Position:
        """Record and return the position of a run that was never sent to this tracker."""
        name = self.path.resolve().name
        position = Position(f"{name}-{secrets.token_hex(4)}")
        position.write(self.directory)
        return position

    def follow(self) -> Followed:
        """Send the rows until the run ends, then close the page."""
        with closing(Tail(Run(self.path).metrics)) as tail:
            status = self._send_until_end(tail)
        place = self._close(status)
        return Followed(self.sent, status, place)

    def _send_until_end(self, tail: Tail) -> str:
        """Send the rows until the run ends; return how it ended."""
        while True:
            is_running = has_writer(self.path)  # checked before reading: if the run has ended, the file is complete
            self._send_new(tail)
            if self._is_replaced():
                return REPLACED
            has_ended = "ended" in tail.last
            if is_running is False or (is_running is None and has_ended):
                return how_ended([tail.last], self._steps()) or "killed"
            time.sleep(self.poll)

    def _send_new(self, tail: Tail) -> None:
        """Send the new rows, up to `Tracker.at_once` rows per call."""
        rows = list[Row]()
        for row in self._new_rows(tail):
            rows.append(row)
            if len(rows) == self.tracker.at_once:
                self._send(rows)
                rows = []
        if rows:
            self._send(rows)

    def _new_rows(self, tail: Tail) -> Iterator[Row]:
        """Yield the rows that the tracker has not received; before the first, open the page."""
        highest = self.position.order
        if not self.is_open:
            has_new = any(row.order > highest for row in tail.rows())
            if not has_new:
                return
            highest = self._open()
            tail.restart()  # the tracker may have lost rows

        for row in tail.rows():
            if row.order > highest:  # other rows were sent before: a resume from an earlier checkpoint repeats steps
                highest = row.order
                yield row

    def _send(self, rows: list[Row]) -> None:
        """Send rows and record the position, unless the run was replaced."""
        if self._is_replaced():
            return
        with self._reported():
            mark = self.tracker.send(rows)
        self.sent += len(rows)
        self._record(self.position._replace(order=rows[-1].order, mark=mark, ended=""))

    def _open(self) -> int:
        """Open the page; return the `order` of the last row that the tracker has."""
        name = self.path.resolve().name
        settings = settings_to_send(flat(Run(self.path).config()))
        page = Page(name, self.position.id, settings, self.directory)
        with self._reported():
            stored = self.tracker.open(page, self.position.mark)
        self.is_open = True
        return self.position.order if stored is None else stored

    def _close(self, status: str) -> str:
        """Close the page, and return its place (`Followed`), or "" without a page to close.

        If this follower has opened no page, the page of an earlier follower is opened and closed, unless it was closed with
        this status, or the run was replaced.
        """
        if not self.is_open:
            was_sent = self.position.order >= 0
            if status == REPLACED or not was_sent or self.position.ended == status:
                return ""
            self._open()  # an earlier follower has sent all rows, but not this status
        with self._reported():
            place = self.tracker.close("killed" if status == REPLACED else status)
        if status != REPLACED:
            self._record(self.position._replace(ended=status))
        return place

    def _record(self, position: Position) -> None:
        """Set the position, and write it to its file."""
        self.position = position
        with suppress(FileNotFoundError):  # the run was renamed, deleted or replaced
            self.position.write(self.directory)

    def _is_replaced(self) -> bool:
        """Return whether the directory of the run was renamed, deleted or replaced by a new run."""
        position = Position.read(self.directory)
        return position is None or position.id != self.position.id

    def _steps(self) -> int:
        return Run(self.path).config().train.steps

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Convert an exception of the tracker to a one-line `TrainingFailed`."""
        try:
            yield
        except UserError:
            raise
        except Exception as e:
            name = self.tracker.name
            reason = f"{type(e).__name__}: {one_line(e, 300)}"
            again = f"jaxgpt follow {self.path} --to {name}"
            raise TrainingFailed(f"the tracker {name} failed: {reason}; send the remaining rows with: {again}") from e
