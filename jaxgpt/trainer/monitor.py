"""Monitor: report the process that delays the next step of a run, and end a stuck run on a signal."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.early_end import exit_now, with_advice
from jaxgpt.errors import UNFINISHED
from jaxgpt.parallel.heartbeat import set_status, statuses
from jaxgpt.parallel.processes import is_leader
from jaxgpt.signals import Stop
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.prefetch import wait_for
from jaxgpt.trainer.program import Program

READING = "reading the data"
COMPUTING = "computing"


class Timeouts(NamedTuple):
    """Time limits of the monitor in seconds, and the factor `slower`."""

    step: float = 180.0  # limit of a step, after which the run counts as stuck
    stage: float = 1800.0  # limit of compiling, of a part of an evaluation, and of saving a checkpoint
    slower: float = 10.0  # minimum of each limit, as a multiple of the longest step so far
    stop: float = 20.0  # limit of reaching the next step after a signal
    every: float = 1.0  # interval between checks


TIMEOUTS = Timeouts()


class Status(NamedTuple):
    """The activity that a process publishes."""

    step: int  # number of steps whose metrics the process has read
    activity: str


class Monitor(Listener):
    """A listener that detects a run without progress; `monitored` calls `check` in a thread.

    Args:
        stop: the request to stop.
        note: called with a one-line message, if the run is stuck.
        timeouts: see `Timeouts`.
        clock: monotonic time in seconds.
        end: called with a line and an exit code, if the run does not react to a request to stop.
    """

    def __init__(
        self,
        stop: Stop,
        note: Callable[[str], None],
        timeouts: Timeouts = TIMEOUTS,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[str, int], Any] = exit_now,
    ) -> None:
        self.stop = stop
        self.print_note = note
        self.timeouts = timeouts
        self.clock = clock
        self.end = end
        self.step = 0
        self.activity = COMPUTING
        self.longest = 0.0  # seconds of the longest step so far
        self._at = clock()  # time of the last progress
        self._step_at: float | None = None  # time of the last step or evaluation; None: no step yet
        self._in_stage = False
        self._is_reported = False  # whether the present lack of progress has been reported

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self.step = step

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        self._in_stage = bool(name)
        self._progress(name or COMPUTING)

    def progress(self, metrics: dict[str, float]) -> None:
        now = self.clock()
        if self._step_at is not None:
            self.longest = max(self.longest, now - self._step_at)
        self._step_at = now
        self.step = int(metrics["step"]) + 1
        self._progress(COMPUTING)

    def evaluated(self, step: int, result: Result) -> None:
        if self._step_at is not None:
            self._step_at = self.clock()  # the time of the next step excludes the evaluation

    def wait(self, future: Future[Any]) -> None:
        """Wait for the result of reading data, or until a stop is requested."""
        before = self.activity
        self._progress(READING)
        wait_for(future, lambda: self.stop.requested)
        self._progress(before)

    def status(self) -> str:
        """Return the status to publish, as JSON."""
        return json.dumps(self._own_status())

    def check(self) -> None:
        """Report a stuck run once, in process 0; end this process if the run does not react to a request to stop."""
        if self._is_stuck() and not self._is_reported and is_leader():
            self._is_reported = True
            self.print_note(f"{self.explain()}; Ctrl-C or SIGTERM stops the run")
        if self._ignores_stop():
            self.end(with_advice(f"stopped without saving: {self.explain()}"), UNFINISHED)

    def _is_stuck(self) -> bool:
        """Return whether the run has made no progress for longer than a step or stage may take."""
        limit = self.timeouts.stage if self._in_stage else self.timeouts.step
        return self.clock() - self._at > max(limit, self._slow_step())

    def _ignores_stop(self) -> bool:
        """Return whether a signal requests a stop, and the run has not reached its next step in time.

        The limit is `Timeouts.stop`, or `Timeouts.step` until two steps have ended; slow steps extend the limit. A second
        signal, more than `signals.TWICE` seconds after the first, ends the wait if there was no progress since the first.
        During a stage, such as saving a checkpoint, there is no limit.
        """
        arrived = self.stop.arrived
        if arrived is None or self._in_stage:
            return False
        if self.stop.repeated and self._at < arrived:
            return True
        waited = self.clock() - max(self._at, arrived)
        limit = self.timeouts.stop if self.longest else self.timeouts.step
        return waited > max(limit, self._slow_step())

    def _slow_step(self) -> float:
        """Return the seconds that a slow step may take."""
        return self.timeouts.slower * self.longest

    def _own_status(self) -> Status:
        return Status(self.step, self.activity)

    def explain(self) -> str:
        """Describe the process that delays the others: preferably a process that does not compute, at the earliest step."""
        own = self._own_status()
        delay = minutes(self.clock() - self._at)
        found = parsed(statuses())
        if not found:
            return f"step {own.step + 1} was not reached for {delay}: {own.activity}"
        found[0] = own
        process, status = min(found.items(), key=lambda item: (item[1].activity == COMPUTING, item[1].step))
        return f"process {process} has not reached step {status.step + 1} for {delay}: {status.activity}"

    def _progress(self, activity: str) -> None:
        self.activity = activity
        self._at = self.clock()
        self._is_reported = False


@contextmanager
def monitored(stop: Stop, note: Callable[[str], None], timeouts: Timeouts = TIMEOUTS) -> Iterator[Monitor]:
    """Yield a `Monitor`, check it in a thread, and publish its status to the other processes."""
    monitor = Monitor(stop, note, timeouts)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(timeouts.every):
            monitor.check()

    threading.Thread(target=repeat, daemon=True).start()
    set_status(monitor.status)
    try:
        yield monitor
    finally:
        set_status(str)
        ended.set()


def parsed(found: Mapping[int, str]) -> dict[int, Status]:
    """Parse the published statuses; skip processes without a status."""
    return {process: Status(*json.loads(text)) for process, text in found.items() if text}


def minutes(seconds: float) -> str:
    """Format a duration as in "3 minutes" or "40 seconds"."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes"
