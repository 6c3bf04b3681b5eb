"""Recent training speed and remaining time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxgpt.config import Config, ModelConfig, TrainConfig
from jaxgpt.trainer.speed import WINDOW, Speed

CONFIG = Config(model=ModelConfig(block_size=5), train=TrainConfig(batch_size=2, steps=100))  # 10 tokens per step


class Run:
    """Calls of steps, as in the training loop, on a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 100, mfu: float = 0.0) -> None:
        self.now, self.done = 1000.0, 0
        monkeypatch.setattr("jaxgpt.trainer.record.time.perf_counter", lambda: self.now)
        self.speed = Speed(replace(CONFIG, train=TrainConfig(batch_size=2, steps=steps)), mfu)

    def call(self, seconds: float, steps: int = 1) -> None:
        self.now += seconds
        self.done += steps
        speed = self.speed.call_ended(self.done)
        self.values = speed.metrics | speed.estimates


def test_no_speed_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call may include compilation."""
    run = Run(monkeypatch, steps=12, mfu=1e-3)
    run.call(60.0)
    assert run.values == {}
    run.call(2.0)
    assert run.values == pytest.approx({"tokens_per_second": 5.0, "mfu": 0.005, "seconds_left": 20.0})


def test_the_speed_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for seconds in [0.1] * 1001 + [1.0] * (int(WINDOW) + 1):
        run.call(seconds)
    assert run.values["tokens_per_second"] == pytest.approx(10.0)


def test_long_calls_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, steps=25)
    run.call(1.0)
    for _ in range(3):
        run.call(4 * WINDOW, steps=8)
    assert run.values == pytest.approx({"tokens_per_second": 80 / (4 * WINDOW), "seconds_left": 0.0})
    run.call(WINDOW / 2, steps=8)
    assert run.values["tokens_per_second"] == pytest.approx(160 / (4.5 * WINDOW))


def test_evaluations_count_towards_time_left_but_not_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, steps=21)
    for _ in range(10):
        run.call(1.0)
    run.now += 5.0
    run.speed.exclude(5.0)
    run.call(1.0)
    assert run.values == pytest.approx({"tokens_per_second": 10.0, "seconds_left": 15.0})
