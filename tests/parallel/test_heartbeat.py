"""A silent process is named before JAX aborts; a process without a status is not judged."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jaxgpt import early_end
from jaxgpt.parallel.heartbeat import BEAT, Heartbeats, not_training


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Room:
    """Processes with a common store and clock; `lines` holds the line and exit code of each ended process."""

    def __init__(self, count: int) -> None:
        self.values: dict[str, str] = {}
        self.clock = Clock()
        self.lines: dict[int, tuple[str, int]] = {}
        self.beats = [
            Heartbeats(self, index, count, 30, self.clock, lambda *line, index=index: self.lines.update({index: line}))
            for index in range(count)
        ]
        for beats in self.beats:
            beats.status = lambda: "training"

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, prefix: str) -> dict[str, str]:
        return {key.rpartition("/")[2]: value for key, value in self.values.items() if key.startswith(prefix)}

    def pass_time(self, seconds: int, *, silent: tuple[int, ...] = (), stuck: bool = False) -> None:
        """Exchange and judge each second, except in `silent` processes; `stuck`: process 0 does not answer."""
        for _ in range(seconds):
            self.clock.now += 1
            for index, beats in enumerate(self.beats):
                if index in silent:
                    continue
                if not stuck:
                    beats.exchange()
                beats.judge()


@pytest.fixture(autouse=True)
def advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_end._advice, "current", lambda: "the checkpoint of step 4 is kept; resume with: X")


def test_a_silent_process_is_named_in_one_line_by_all_others() -> None:
    room = Room(3)
    room.pass_time(60)
    assert room.lines == {}
    room.pass_time(29, silent=(1,))
    assert room.lines == {}
    room.pass_time(3, silent=(1,))
    line = (
        "process 1 sent no heartbeat for 30 s (--distributed.heartbeat-seconds): paused, unreachable or overloaded: the "
        "checkpoint of step 4 is kept; resume with: X"
    )
    assert room.lines == {0: (line, 1), 2: (line, 1)}


def test_a_process_that_was_paused_says_so() -> None:
    room = Room(2)
    room.pass_time(10)
    room.clock.now += 45
    room.beats[1].judge()
    line, code = room.lines[1]
    assert line.startswith(
        "process 1 was paused for 45 s (--distributed.heartbeat-seconds 30): the checkpoint of step 4"
    )
    assert code == 1


def test_process_0_is_named_if_it_does_not_answer() -> None:
    room = Room(2)
    room.pass_time(10)
    room.pass_time(31, silent=(0,), stuck=True)
    assert list(room.lines) == [1]
    assert room.lines[1][0].startswith("process 0 sent no heartbeat for 30 s")


@pytest.mark.parametrize("end", ["no status", "stop"])
def test_a_process_that_does_not_train_is_not_judged(end: str) -> None:
    """Before the first step, native code may hold Python's lock; finished processes wait for the sample of process 0."""
    room = Room(2)
    room.pass_time(10)
    if end == "stop":
        room.beats[1].stop()
    else:
        room.beats[1].status = not_training
        room.pass_time(1)
    room.pass_time(100, silent=(1,))
    assert room.lines == {}


def test_nothing_ends_after_stop() -> None:
    room = Room(2)
    room.pass_time(10)
    room.beats[0].stop()
    room.pass_time(100, silent=(1,))
    assert room.lines == {}


class SlowBoard(dict[str, str]):
    """A store whose first write takes until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing = threading.Event()
        self.release = threading.Event()

    def put(self, key: str, value: str) -> None:
        if not self.is_writing.is_set():
            self.is_writing.set()
            self.release.wait(10)
        self[key] = value

    def get(self, prefix: str) -> dict[str, str]:  # type: ignore[override]
        return {}


def test_the_last_published_status_is_that_of_a_process_that_has_stopped() -> None:
    """An exchange may still be writing "training" when the process stops: process 0 would then judge it."""
    board = SlowBoard()
    beats = Heartbeats(board, 1, 2, limit=0.01, clock=lambda: 0.0)
    beats.status = lambda: "training"
    beats.start()
    assert board.is_writing.wait(10)
    threading.Timer(0.1, board.release.set).start()
    beats.stop()
    beats._exchanging.join(10)
    assert board[f"{BEAT}1"] == "2 "


def test_a_broken_connection_does_not_end_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(1)
    calls: list[int] = []

    def act() -> Any:
        calls.append(len(calls))
        if len(calls) == 3:
            room.beats[0]._ended.set()
        raise RuntimeError("UNAVAILABLE")

    room.beats[0].limit = 0.01
    room.beats[0]._repeat(act)
    assert calls == [0, 1, 2]
