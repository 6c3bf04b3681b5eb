"""Recent training speed and remaining time."""

from __future__ import annotations

import pytest

from jaxgpt.trainer.clock import WINDOW, Clock


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("jaxgpt.trainer.clock.time.perf_counter", lambda: self.now)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def call(clock: Clock, time: Time, seconds: float, steps: int = 1, tokens: int = 10) -> None:
    """Count one call, as the training loop does."""
    time.now += seconds
    clock.call_ended(steps * tokens)
    for _ in range(steps):
        clock.count(tokens)


def test_no_speed_after_the_first_call(time: Time) -> None:
    """The first call may include compilation; a resumed run does not inherit a speed."""
    clock = Clock(elapsed_seconds=5000.0)
    call(clock, time, 60.0)
    assert clock.recent(100) == {}
    call(clock, time, 2.0)
    assert clock.recent(100) == pytest.approx({"tokens_per_second": 5.0, "seconds_left": 20.0})


def test_mfu_is_proportional_to_the_speed(time: Time) -> None:
    clock = Clock(0.0, mfu=1e-3)
    for seconds in (60.0, 2.0, 1.0):
        call(clock, time, seconds, tokens=30)
    assert clock.recent(0)["mfu"] == pytest.approx(0.02)
    assert clock.metrics(0)["mfu"] == pytest.approx(0.02)


def test_recent_speed_shows_a_slowdown_that_the_mean_hides(time: Time) -> None:
    clock = Clock(0.0)
    for _ in range(1001):
        call(clock, time, 0.1)
    for _ in range(int(WINDOW) + 1):
        call(clock, time, 1.0)
    assert clock.recent(100)["tokens_per_second"] == pytest.approx(10.0)
    assert clock.metrics(0)["tokens_per_second"] > 90


def test_long_calls_of_several_steps(time: Time) -> None:
    clock = Clock(0.0)
    call(clock, time, 1.0)
    for _ in range(3):
        call(clock, time, 4 * WINDOW, steps=8)
    assert clock.recent(0) == pytest.approx({"tokens_per_second": 80 / (4 * WINDOW), "seconds_left": 0.0})
    call(clock, time, WINDOW / 2, steps=8)
    assert clock.recent(0)["tokens_per_second"] == pytest.approx(160 / (4.5 * WINDOW))


def test_evaluations_count_towards_time_left_but_not_speed(time: Time) -> None:
    clock = Clock(0.0)
    for _ in range(11):
        call(clock, time, 1.0)
    with clock.paused():
        time.now += 5.0
    call(clock, time, 0.0, steps=0)
    assert clock.recent(100) == pytest.approx({"tokens_per_second": 10.0, "seconds_left": 15.0})
