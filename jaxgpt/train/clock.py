"""How fast training is, and how long ago something was kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Mean speed of training so far, without what evaluation and the first step took."""

    def __init__(self, elapsed_seconds: float) -> None:
        self.started = time.perf_counter() - elapsed_seconds
        self.last_save = time.perf_counter()
        self.since: float | None = None
        self.tokens = 0

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
            self.since += time.perf_counter() - before
