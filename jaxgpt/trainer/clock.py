"""Measure the speed of training, the remaining time, and the time since the last checkpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW = 10.0  # seconds over which the recent speed is measured; at least one call


class Clock:
    """The mean and the recent speed of training, excluding evaluations and the first step."""

    def __init__(self, elapsed_seconds: float, mfu: float = 0.0) -> None:
        """
        Args:
            elapsed_seconds: time before this process trained.
            mfu: MFU at one token per second; 0: unknown.
        """
        self.mfu = mfu
        self.started = time.perf_counter() - elapsed_seconds
        self.last_save = time.perf_counter()
        self.since: float | None = None
        self.tokens = 0
        self._paused = 0.0
        self._calls: deque[tuple[float, int]] = (
            deque()
        )  # end of each recent call, and the total number of tokens until then

    def saved(self) -> None:
        self.last_save = time.perf_counter()

    def since_save(self) -> float:
        """Seconds since the last checkpoint, or the start."""
        return time.perf_counter() - self.last_save

    def count(self, tokens: int) -> None:
        if self.since is None:
            self.since = time.perf_counter()
        else:
            self.tokens += tokens

    def call_ended(self, tokens: int) -> None:
        """Record the tokens of a call that has ended. The first call starts the clock and is not measured."""
        now = time.perf_counter()
        self._calls.append((now, self._calls[-1][1] + tokens if self._calls else 0))
        while len(self._calls) > 2 and self._calls[1][0] <= now - WINDOW:
            self._calls.popleft()

    def recent(self, tokens_left: int) -> dict[str, float]:
        """Compute the recent tokens per second, and the seconds left at that speed; {} before they are known.

        Evaluations are assumed to take the same share of time as before.

        Args:
            tokens_left: tokens that the run has yet to train on.
        """
        if len(self._calls) < 2 or self.since is None:
            return {}
        (start, before), (end, after) = self._calls[0], self._calls[-1]
        speed = (after - before) / max(end - start, 1e-9)
        training = max(time.perf_counter() - self.since, 1e-9)
        return self._rate(speed) | {"seconds_left": tokens_left / speed * (1 + self._paused / training)}

    def metrics(self, tokens: int) -> dict[str, float]:
        now = time.perf_counter()
        metrics: dict[str, float] = {"tokens": tokens, "elapsed_seconds": now - self.started}
        if self.tokens and self.since is not None:
            metrics |= self._rate(self.tokens / (now - self.since))
        return metrics

    def _rate(self, tokens_per_second: float) -> dict[str, float]:
        mfu = {"mfu": self.mfu * tokens_per_second} if self.mfu else {}
        return {"tokens_per_second": tokens_per_second} | mfu

    @contextmanager
    def paused(self) -> Iterator[Callable[[], float]]:
        """Exclude a block from the time of training; yields a function that returns the seconds since the block began."""
        before = time.perf_counter()
        yield lambda: time.perf_counter() - before
        if self.since is not None:
            seconds = time.perf_counter() - before
            self.since += seconds
            self._paused += seconds
            self._calls = deque((ended + seconds, tokens) for ended, tokens in self._calls)
