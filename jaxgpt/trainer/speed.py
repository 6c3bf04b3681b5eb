"""Speed: tokens per second, remaining time, and the time since the last checkpoint."""

from __future__ import annotations

import time
from collections import deque

from jaxgpt.config import Config

WINDOW = 10.0  # seconds over which the recent speed is measured; at least one call


class Speed:
    """The mean and the recent speed of training, without evaluations and the first call.

    Args:
        config: settings of the run.
        elapsed_seconds: time before this process trained.
        mfu: MFU at one token per second; 0: unknown.
    """

    def __init__(self, config: Config, elapsed_seconds: float, mfu: float = 0.0) -> None:
        self.steps, self.mfu = config.train.steps, mfu
        self.tokens_per_step = config.train.batch_size * config.window
        now = time.perf_counter()
        self._began, self._last_save, self._excluded = now - elapsed_seconds, now, 0.0
        self._first: tuple[float, int] | None = None  # end of the first call, and the steps done at that time
        self._calls: deque[tuple[float, int]] = deque()  # the same of the recent calls

    def call_ended(self, steps: range) -> None:
        """Record that a call has ended. The first call includes overhead and is not measured."""
        self._calls.append((time.perf_counter(), steps.stop))
        self._first = self._first or self._calls[0]
        while len(self._calls) > 2 and self._calls[1][0] <= self._calls[-1][0] - WINDOW:
            self._calls.popleft()

    @property
    def started(self) -> bool:
        """Return whether the first call has ended."""
        return self._first is not None

    def mean(self, step: int) -> dict[str, float]:
        """Return the elapsed seconds and, after the first call, the mean speed up to a step."""
        now = time.perf_counter()
        elapsed = {"elapsed_seconds": now - self._began}
        if self._first is None or step < self._first[1]:
            return elapsed
        return elapsed | self._rate(step + 1 - self._first[1], now - self._first[0])

    def recent(self, step: int) -> dict[str, float]:
        """Return the recent speed, and the seconds left at that speed; {} before it is known.

        Evaluations are assumed to take the same share of time as before.
        """
        if self._first is None or len(self._calls) < 2:
            return {}
        (start, before), (end, after) = self._calls[0], self._calls[-1]
        rate = self._rate(after - before, end - start)
        training = max(time.perf_counter() - self._first[0], 1e-9)
        tokens_left = (self.steps - step - 1) * self.tokens_per_step
        return rate | {"seconds_left": tokens_left / rate["tokens_per_second"] * (1 + self._excluded / training)}

    def exclude(self, seconds: float) -> None:
        """Exclude the last seconds, such as an evaluation, from the time of training."""
        if self._first is not None:
            self._first = self._first[0] + seconds, self._first[1]
            self._excluded += seconds
            self._calls = deque((ended + seconds, steps) for ended, steps in self._calls)

    def saved(self) -> None:
        """Record that a checkpoint is written."""
        self._last_save = time.perf_counter()

    def since_save(self) -> float:
        """Return the seconds since the last checkpoint, or the start."""
        return time.perf_counter() - self._last_save

    def _rate(self, steps: int, seconds: float) -> dict[str, float]:
        speed = steps * self.tokens_per_step / max(seconds, 1e-9)
        return {"tokens_per_second": speed} | ({"mfu": self.mfu * speed} if self.mfu else {})
