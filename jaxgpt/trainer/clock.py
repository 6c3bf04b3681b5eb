"""How fast training is, how long it still takes, and how long ago a checkpoint was saved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW = 10.0  # seconds over which the recent speed is measured; a call that takes longer is measured whole


class Clock:
    """Speed of training, without the time spent on evaluation and the first step: its mean, and that of the last seconds."""

    def __init__(self, elapsed_seconds: float) -> None:
        self.started = time.perf_counter() - elapsed_seconds
        self.last_save = time.perf_counter()
        self.since: float | None = None
        self.tokens = 0
        self._paused = 0.0
        self._calls: deque[tuple[float, int]] = deque()  # when each of the last calls ended, and all tokens until then

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
        """Note that a call has trained on so many tokens. The first one, which starts the watch, is not measured."""
        now = time.perf_counter()
        self._calls.append((now, self._calls[-1][1] + tokens if self._calls else 0))
        while len(self._calls) > 2 and self._calls[1][0] <= now - WINDOW:
            self._calls.popleft()

    def recent(self, tokens_left: int) -> dict[str, float]:
        """Tokens per second over the last seconds, and the seconds that remain at that speed; {} before they are known.

        Args:
            tokens_left: on which the run still trains. Evaluations are expected to take the share of time they took so far.
        """
        if len(self._calls) < 2 or self.since is None:
            return {}
        (start, before), (end, after) = self._calls[0], self._calls[-1]
        speed = (after - before) / max(end - start, 1e-9)
        training = max(time.perf_counter() - self.since, 1e-9)
        return {"tokens_per_second": speed, "seconds_left": tokens_left / speed * (1 + self._paused / training)}

    def figures(self, tokens: int) -> dict[str, float]:
        now = time.perf_counter()
        figures: dict[str, float] = {"tokens": tokens, "elapsed_seconds": now - self.started}
        if self.tokens and self.since is not None:
            figures["tokens_per_second"] = self.tokens / (now - self.since)
        return figures

    @contextmanager
    def paused(self) -> Iterator[Callable[[], float]]:
        """What happens within does not count as training; to be asked for how long it has taken, in seconds."""
        before = time.perf_counter()
        yield lambda: time.perf_counter() - before
        if self.since is not None:
            seconds = time.perf_counter() - before
            self.since += seconds
            self._paused += seconds
            self._calls = deque((ended + seconds, tokens) for ended, tokens in self._calls)
