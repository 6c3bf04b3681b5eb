"""Recent training speed and remaining time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxgpt.config import Config, ModelConfig, TrainConfig
from jaxgpt.trainer.speed import WINDOW, Speed

CONFIG = Config(model=ModelConfig(block_size=5), train=TrainConfig(batch_size=2, steps=100))  # 10 tokens per step


class Run:
    """Calls of steps on a clock of its own, as the training loop makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config = CONFIG, **options: float) -> None:
        self.now, self.done = 1000.0, 0
        monkeypatch.setattr("jaxgpt.trainer.speed.time.perf_counter", lambda: self.now)
        self.speed = Speed(config, **{"elapsed_seconds": 0.0} | options)

    def call(self, seconds: float, steps: int = 1) -> None:
        self.now += seconds
        self.speed.call_ended(range(self.done, self.done + steps))
        self.done += steps

    def recent(self) -> dict[str, float]:
        return self.speed.recent(self.done - 1)

    def mean(self) -> dict[str, float]:
        return self.speed.mean(self.done - 1)


def test_no_speed_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call may include compilation; a resumed run does not inherit a speed."""
    run = Run(monkeypatch, replace(CONFIG, train=TrainConfig(batch_size=2, steps=12)), elapsed_seconds=5000.0)
    run.call(60.0)
    assert (run.recent(), run.mean()) == ({}, {"elapsed_seconds": 5060.0})
    run.call(2.0)
    assert run.recent() == pytest.approx({"tokens_per_second": 5.0, "seconds_left": 20.0})
    assert run.mean() == pytest.approx({"elapsed_seconds": 5062.0, "tokens_per_second": 5.0})


def test_mfu_is_proportional_to_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, mfu=1e-3)
    for seconds in (60.0, 2.0, 1.0):
        run.call(seconds, steps=3)
    assert run.recent()["mfu"] == pytest.approx(0.02)
    assert run.mean()["mfu"] == pytest.approx(0.02)


def test_recent_speed_shows_a_slowdown_that_the_mean_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for seconds in [0.1] * 1001 + [1.0] * (int(WINDOW) + 1):
        run.call(seconds)
    assert run.recent()["tokens_per_second"] == pytest.approx(10.0)
    assert run.mean()["tokens_per_second"] > 90


def test_long_calls_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, replace(CONFIG, train=TrainConfig(batch_size=2, steps=25)))
    run.call(1.0)
    for _ in range(3):
        run.call(4 * WINDOW, steps=8)
    assert run.recent() == pytest.approx({"tokens_per_second": 80 / (4 * WINDOW), "seconds_left": 0.0})
    run.call(WINDOW / 2, steps=8)
    assert run.recent()["tokens_per_second"] == pytest.approx(160 / (4.5 * WINDOW))


def test_evaluations_count_towards_time_left_but_not_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, replace(CONFIG, train=TrainConfig(batch_size=2, steps=21)))
    for _ in range(11):
        run.call(1.0)
    run.now += 5.0
    run.speed.exclude(5.0)
    assert run.recent() == pytest.approx({"tokens_per_second": 10.0, "seconds_left": 15.0})
    assert run.mean()["tokens_per_second"] == pytest.approx(10.0)
