"""Speed: tokens per second, MFU and the time left of a run."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from jaxgpt.config import Config

WINDOW = 10.0  # averaging window of the speed in seconds, extended to at least one call


class _Call(NamedTuple):
    """The end of a call.

    Attributes:
        at: time of the end in seconds, minus the excluded seconds until then.
        done: number of steps of the run until then.
    """

    at: float
    done: int


class CallSpeed(NamedTuple):
    """The speed at the end of a call. Both dictionaries are empty for the first call, which may include compilation.

    Attributes:
        metrics: `tokens_per_second` and, if known, `mfu`.
        estimates: `seconds_left` at the mean speed since the first call, including evaluations.
    """

    metrics: dict[str, float]
    estimates: dict[str, float]


class Speed:
    """Recent training speed, excluding evaluations and the first call.

    Args:
        config: settings of the run.
        mfu: MFU at one token per second; 0: unknown.
    """

    def __init__(self, config: Config, mfu: float = 0.0) -> None:
        self.steps = config.train.steps
        self.mfu = mfu
        self.tokens_per_step = config.train.batch_size * config.row_tokens
        self._began = 0.0  # end time of the first call
        self._first = 0  # number of steps of the run at the end of the first call
        self._excluded = 0.0  # seconds excluded from the speed
        self._calls: deque[_Call] = deque()  # ends of recent calls

    def call_ended(self, done: int) -> CallSpeed:
        """Record the end of a call, after `done` steps of the run."""
        now = time.perf_counter()
        last = _Call(now - self._excluded, done)
        self._calls.append(last)
        if len(self._calls) == 1:
            self._began = now
            self._first = done
            return CallSpeed({}, {})

        # Compute the speed of the calls in the last `WINDOW` seconds.
        while len(self._calls) > 2 and self._calls[1].at <= last.at - WINDOW:
            self._calls.popleft()
        first = self._calls[0]
        speed = (last.done - first.done) * self.tokens_per_step / max(last.at - first.at, 1e-9)
        left = (now - self._began) / (done - self._first) * (self.steps - done)
        metrics = {"tokens_per_second": speed}
        if self.mfu:
            metrics["mfu"] = self.mfu * speed
        return CallSpeed(metrics, {"seconds_left": left})

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds`, for example of an evaluation, from the recent speed."""
        self._excluded += seconds
