"""A run without progress is explained: which process, which step, what it does; a signal ends it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import TEXT, small_run

from jaxgpt import early_end, signals
from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.data import Batches
from jaxgpt.signals import Stop
from jaxgpt.trainer import monitor, prefetch
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import train
from jaxgpt.trainer.monitor import COMPUTING, READING, Monitor, Status, Timeouts, minutes
from jaxgpt.trainer.start import Start

TIMEOUTS = Timeouts(step=180, stage=1800, slower=10, stop=20)


class Notes(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Scene:
    """A monitor with a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.stop, self.notes = 0.0, Stop(), Notes()
        self.ends: list[tuple[str, int]] = []
        self.monitor = Monitor(
            self.stop, self.notes.note, TIMEOUTS, lambda: self.now, lambda *line: self.ends.append(line)
        )

    def steps(self, count: int, seconds: float = 1) -> None:
        for step in range(count):
            self.wait(seconds)
            self.monitor.progress({"step": step, "loss": 1.0})

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.monitor.check()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(early_end._advice, "current", lambda: "the checkpoint of step 4 is kept")
    return Scene()


def test_a_run_without_progress_is_reported_once(scene: Scene) -> None:
    scene.steps(11)
    scene.wait(179)
    assert scene.notes.lines == []
    scene.wait(2)
    scene.wait(600)
    [line] = scene.notes.lines
    assert line == "step 12 was not reached for 3 minutes: computing; Ctrl-C or SIGTERM stops the run"


def test_slow_steps_are_normal(scene: Scene) -> None:
    """A step may take ten times as long as the longest step so far; the first step, which compiles, does not count."""
    scene.steps(1, seconds=170)
    scene.steps(3, seconds=100)
    scene.wait(990)
    assert scene.notes.lines == []
    scene.wait(20)
    assert len(scene.notes.lines) == 1


@pytest.mark.parametrize("stage", ["compiling", "evaluating", "saving a checkpoint"])
def test_a_stage_may_take_long_and_is_named(stage: str, scene: Scene) -> None:
    scene.steps(11)
    scene.monitor.stage(stage)
    scene.wait(1790)
    assert scene.notes.lines == []
    scene.wait(20)
    assert scene.notes.lines[0].startswith(f"step 12 was not reached for 30 minutes: {stage};")


def test_the_parts_of_an_evaluation_are_progress(scene: Scene) -> None:
    for done in range(10):
        scene.monitor.stage("evaluating", done, 10)
        scene.wait(1000)
    assert scene.notes.lines == []


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({1: Status(11, READING)}, "process 1 has not reached step 12 for 3 minutes: reading the data"),
        (
            {1: Status(11, COMPUTING), 2: Status(9, COMPUTING)},
            "process 2 has not reached step 10 for 3 minutes",
        ),
        ({1: Status(12, COMPUTING)}, "process 0 has not reached step 12 for 3 minutes: computing"),
    ],
)
def test_the_process_that_others_wait_for_is_named(
    others: dict[int, Status], named: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {0: "", **{process: json.dumps(status) for process, status in others.items()}}
    monkeypatch.setattr(monitor, "statuses", lambda: texts)
    scene.steps(11)
    scene.wait(181)
    assert scene.notes.lines[0].startswith(named)


def signaled(scene: Scene, repeated: bool = False) -> None:
    scene.stop.arrived, scene.stop.repeated = scene.now, repeated


def test_a_signal_ends_a_stuck_run(scene: Scene) -> None:
    scene.steps(11)
    scene.wait(60)
    signaled(scene)
    scene.wait(19)
    assert scene.ends == []
    scene.wait(2)
    expected = (
        "stopped without saving: step 12 was not reached for 81 seconds: computing: the checkpoint of step 4 is kept"
    )
    assert scene.ends[0] == (expected, 75)


def test_a_second_signal_ends_a_stuck_run_at_once(scene: Scene) -> None:
    scene.steps(11)
    scene.wait(60)
    signaled(scene, repeated=True)
    scene.wait(1)
    assert len(scene.ends) == 1


def test_a_signal_lets_a_slow_step_and_a_checkpoint_finish(scene: Scene) -> None:
    scene.steps(5, seconds=30)
    signaled(scene, repeated=False)
    scene.wait(290)
    assert scene.ends == []
    scene.monitor.stage("saving a checkpoint")
    signaled(scene, repeated=True)
    scene.wait(1000)
    assert scene.ends == []


def test_a_signal_lets_the_first_step_finish(scene: Scene) -> None:
    """The duration of a step is unknown."""
    scene.steps(1)
    signaled(scene)
    scene.wait(170)
    assert scene.ends == []


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 seconds"), (119, "119 seconds"), (180, "3 minutes")])
def test_durations(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_signals_are_counted_and_a_burst_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing terminal sends SIGHUP several times."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stop = Stop()
    for seconds, repeated in ((0, False), (1, False), (1.5, True)):
        now[0] += seconds
        stop.count()
        assert (stop.arrived, stop.repeated) == (100.0, repeated)


def test_data_that_hang_do_not_keep_a_signal_from_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a read never returns, as on a mount that hangs, SIGTERM saves the last step, and the run can be resumed."""
    at, hangs = Batches.at, threading.Event()

    def hang(self: Batches, step: int) -> Any:
        if step == 6:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hangs.wait(60)
        return at(self, step)

    Path("text.txt").write_text(TEXT)
    monkeypatch.setattr(Batches, "at", hang)
    monkeypatch.setattr(prefetch, "LEAVING", 0.1)
    outcome = train(Start(small_run(), "out"), Notes())
    hangs.set()
    assert (outcome.stopped, outcome.step) == (True, 6)
    assert max(checkpoints(Path("out/checkpoints"))) == 6
