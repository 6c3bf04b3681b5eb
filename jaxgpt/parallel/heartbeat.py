"""Heartbeats between the processes of a run: report a silent process before JAX's coordination service aborts.

Each process publishes its status in the key-value store of JAX's coordinator, and reads all statuses. Process 0 judges the
other processes: a training process that publishes nothing new for `limit` seconds is paused, unreachable or dead. A process
without a status, such as while it reads the data before training, is not judged: native code can hold Python's global
interpreter lock for longer than the limit. During this time, only JAX's own heartbeats continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from jaxgpt.early_end import exit_now, with_advice
from jaxgpt.errors import FAILED

BEATS = 6  # number of heartbeats per time limit
LAST_WORDS = 2  # seconds for other processes to report the same error; XLA ends them when process 0 exits
OPTION = "--distributed.heartbeat-seconds"
EXCHANGE = 2.0  # maximum seconds that `stop` waits for an exchange in progress
# Directories of keys: the verdict of process 0, and the status of each process.
VERDICT = "jaxgpt/verdict/"
BEAT = "jaxgpt/beat/"


class Board(Protocol):
    """The interface of a key-value store that all processes share."""

    def put(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, prefix: str) -> dict[str, str]:
        """Return the values of the keys that begin with `prefix`, keyed by the remainder of the key."""


class CoordinatorBoard:
    """The key-value store of JAX's coordinator."""

    def __init__(self) -> None:
        from jax._src.distributed import global_state  # a private module: there is no public equivalent

        self.client: Any = global_state.client

    def put(self, key: str, value: str) -> None:
        """Store a value."""
        self.client.key_value_set(key, value, allow_overwrite=True)

    def get(self, prefix: str) -> dict[str, str]:
        """Return the values of the keys that begin with `prefix`, keyed by the remainder of the key."""
        return {key.rpartition("/")[2]: value for key, value in self.client.key_value_dir_get(prefix)}


def not_training() -> str:
    """Return "", the status of a process that is not judged."""
    return ""


class Heard(NamedTuple):
    """The last status of a process, and the local time at which this process first read it."""

    beat: int
    status: str
    at: float


class Heartbeats:
    """Publish the status of this process, and end the process if a heartbeat is missing.

    The process ends if process 0 reports a silent process or does not answer, or if this process itself was paused.

    Args:
        board: the key-value store.
        index: index of this process.
        count: number of processes.
        limit: seconds without a heartbeat after which a process counts as lost.
        clock: monotonic time in seconds.
        end: called with a line and an exit code.
    """

    def __init__(
        self,
        board: Board,
        index: int,
        count: int,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[str, int], Any] = exit_now,
    ) -> None:
        self.board = board
        self.index = index
        self.count = count
        self.limit = limit
        self.clock = clock
        self.end = end
        self.status: Callable[[], str] = not_training
        self.heard = {process: Heard(-1, "", clock()) for process in range(count)}
        self._beat = 0
        self._answered = clock()  # time of the last answer of process 0
        self._judged = clock()  # time of the last call of `judge`
        self._ended = threading.Event()
        self._exchanging = threading.Thread(target=self._repeat, args=(self.exchange,), daemon=True)
        self._judging = threading.Thread(target=self._repeat, args=(self.judge,), daemon=True)

    def start(self) -> None:
        """Exchange and judge heartbeats in two threads, because an exchange blocks if process 0 is lost."""
        self._exchanging.start()
        self._judging.start()

    def stop(self) -> None:
        """End the exchange of heartbeats, so that processes may exit in any order; process 0 no longer judges this process."""
        self._ended.set()
        self.status = not_training
        if self._exchanging.is_alive():
            # An exchange in progress may be about to publish the previous status, which must not be the last published
            # status.
            self._exchanging.join(EXCHANGE)
        with suppress(Exception):  # a broken connection
            self._publish()

    def exchange(self) -> None:
        """Publish the status of this process, read all statuses, and end this process if process 0 reports a silent process."""
        self._publish()
        self._read()
        for verdict in self.board.get(VERDICT).values():
            self._end(verdict)

    def _publish(self) -> None:
        """Publish the status of this process, with a number that shows that it is new."""
        self._beat += 1
        self.board.put(f"{BEAT}{self.index}", f"{self._beat} {self.status()}")

    def _read(self) -> None:
        """Read the statuses of all processes."""
        now = self.clock()
        for name, value in self.board.get(BEAT).items():
            beat, _, status = value.partition(" ")
            heard = self.heard[int(name)]
            if int(beat) != heard.beat:
                self.heard[int(name)] = Heard(int(beat), status, now)
        self._answered = now

    def judge(self) -> None:
        """End this process if it was paused, if process 0 does not answer, or, in process 0, if a process is silent.

        Without a status of this process, nothing is judged.
        """
        now = self.clock()
        paused = now - self._judged
        self._judged = now
        if not self.status():
            return
        if paused > self.limit:
            self._end(f"process {self.index} was paused for {paused:.0f} s ({OPTION} {self.limit:g})")
            return
        silent = self._silent(now)
        if not silent:
            return

        names = ", ".join(map(str, silent))
        verb = "process" if len(silent) == 1 else "processes"
        verdict = f"{verb} {names} sent no heartbeat for {self.limit:g} s ({OPTION}): paused, unreachable or overloaded"
        if self.index == 0:
            with suppress(Exception):
                self.board.put(f"{VERDICT}{self.index}", verdict)
        self._end(verdict)

    def _silent(self, now: float) -> list[int]:
        """Return the processes without a heartbeat: process 0 judges the other processes, which in turn judge process 0."""
        if self.index == 0:
            training = [process for process, heard in self.heard.items() if process != 0 and heard.status]
            return [process for process in training if now - self.heard[process].at > self.limit]
        return [0] if now - self._answered > self.limit else []

    def _end(self, verdict: str) -> None:
        """End the process with a line and advice; only the first call has an effect, and only before `stop`."""
        if self._ended.is_set():
            return
        self._ended.set()
        self.end(with_advice(verdict), FAILED)

    def _repeat(self, act: Callable[[], None]) -> None:
        """Call a function `BEATS` times per time limit, until `stop`."""
        while not self._ended.wait(self.limit / BEATS):
            with suppress(Exception):  # a broken connection counts as silence
                act()


# A global variable: the command starts the heartbeats before the run, and does not pass them to the monitor of the run.
_heartbeats: Heartbeats | None = None  # heartbeats of this process; None: a run with a single process


def set_heartbeats(heartbeats: Heartbeats | None) -> None:
    """Set the heartbeats of this process."""
    global _heartbeats
    _heartbeats = heartbeats


def set_status(status: Callable[[], str]) -> None:
    """Set the function that returns the status to publish; "": not training."""
    if _heartbeats is not None:
        _heartbeats.status = status


def statuses() -> dict[int, str]:
    """Return the last status that this process has read from each process; {} in a run with a single process."""
    if _heartbeats is None:
        return {}
    return {process: heard.status for process, heard in _heartbeats.heard.items()}
