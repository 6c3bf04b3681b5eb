"""Speed: recent tokens per second and remaining time."""

from __future__ import annotations

import time
from collections import deque

from jaxgpt.config import Config

WINDOW = 10.0  # seconds over which the speed is measured; at least one call


class Speed:
    """The recent speed of training without evaluations, measured after the first call.

    Args:
        config: settings of the run.
        mfu: MFU at one token per second; 0: unknown.
    """

    def __init__(self, config: Config, mfu: float = 0.0) -> None:
        self.steps, self.mfu = config.train.steps, mfu
        self.tokens_per_step = config.train.batch_size * config.window
        self._began, self._excluded = 0.0, 0.0  # end time of the first call; seconds spent in evaluations
        self._calls: deque[tuple[float, int]] = deque()  # end of recent calls, without evaluations; steps

    def call_ended(self, done: int) -> tuple[dict[str, float], dict[str, float]]:
        """Record that a call has ended with `done` steps.

        Returns two dictionaries: `tokens_per_second` and, if known, `mfu`; and `seconds_left` at the mean speed since
        the first call, including evaluations. Both dictionaries are empty after the first call.
        """
        now = time.perf_counter()
        self._calls.append((now - self._excluded, done))
        if len(self._calls) == 1:
            self._began, self._first = now, done
            return {}, {}
        while len(self._calls) > 2 and self._calls[1][0] <= self._calls[-1][0] - WINDOW:
            self._calls.popleft()
        (start, before), (end, after) = self._calls[0], self._calls[-1]
        speed = (after - before) * self.tokens_per_step / max(end - start, 1e-9)
        left = (now - self._began) / (done - self._first) * (self.steps - done)
        mfu = {"mfu": self.mfu * speed} if self.mfu else {}
        return {"tokens_per_second": speed} | mfu, {"seconds_left": left}

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds`, for example of an evaluation, from the recent speed."""
        self._excluded += seconds
