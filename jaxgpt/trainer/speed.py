"""Speed: recent tokens per second and remaining time."""

from __future__ import annotations

import time
from collections import deque

from jaxgpt.config import Config

WINDOW = 10.0  # seconds over which the speed is measured; at least one call


class Speed:
    """The recent speed of training without evaluations. The first call includes overhead and is not measured.

    Args:
        config: settings of the run.
        mfu: MFU at one token per second; 0: unknown.
    """

    def __init__(self, config: Config, mfu: float = 0.0) -> None:
        self.steps, self.mfu = config.train.steps, mfu
        self.tokens_per_step = config.train.batch_size * config.window
        self._first: tuple[float, int] | None = None  # end of the first call, and the steps done at that time
        self._calls: deque[tuple[float, int]] = deque()  # the same of the recent calls

    @property
    def started(self) -> bool:
        """Return whether the first call has ended."""
        return self._first is not None

    def call_ended(self, steps: range) -> None:
        """Record that a call has ended."""
        self._calls.append((time.perf_counter(), steps.stop))
        self._first = self._first or self._calls[0]
        while len(self._calls) > 2 and self._calls[1][0] <= self._calls[-1][0] - WINDOW:
            self._calls.popleft()

    def exclude(self, seconds: float) -> None:
        """Exclude the last seconds, such as an evaluation, from the speed."""
        self._calls = deque((ended + seconds, steps) for ended, steps in self._calls)

    def recent(self) -> dict[str, float]:
        """Return `tokens_per_second`, and `mfu` if it is known; {} until the second call has ended."""
        if len(self._calls) < 2:
            return {}
        (start, before), (end, after) = self._calls[0], self._calls[-1]
        speed = (after - before) * self.tokens_per_step / max(end - start, 1e-9)
        return {"tokens_per_second": speed} | ({"mfu": self.mfu * speed} if self.mfu else {})

    def remaining(self, step: int) -> dict[str, float]:
        """Return `seconds_left` after a step at the mean speed since the first call, including evaluations; {} at first."""
        if self._first is None or step < self._first[1]:
            return {}
        began, first = self._first
        return {"seconds_left": (time.perf_counter() - began) / (step + 1 - first) * (self.steps - step - 1)}
