"""Progress of long work: the stage, how much of it is done, and the time left."""

from __future__ import annotations

import time
from datetime import timedelta


class Progress:
    """The progress of long work.

    The work calls `stage` when a stage starts, and the object itself when more of the stage is done. A thread can display
    the object: `str` formats it. A subclass can forward the calls.
    """

    def __init__(self, name: str = "") -> None:
        self.stage(name)

    def stage(self, name: str) -> None:
        """Start a stage, without any work done yet."""
        self.name = name
        self.started = time.monotonic()
        self.done = 0
        self.total = 0

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        """Set how much of the stage is done, in any unit (`total` 0: unknown); `detail` replaces the name of the stage."""
        self.done = done
        self.total = total
        self.name = detail or self.name

    def __str__(self) -> str:
        """Format the name, the completed fraction if known, the elapsed time, and the remaining time if known."""
        elapsed = time.monotonic() - self.started
        # Read each counter once, because the working thread changes both.
        done = self.done
        total = self.total
        texts = [self.name]
        if total:
            texts.append(f"{done / total:.0%}")
        texts.append(duration(elapsed))
        if 0 < done < total:
            texts.append(f"{duration(elapsed * (total - done) / done)} left")
        return "  ".join(texts)


NO_PROGRESS = Progress()  # for calls whose progress is not displayed


def duration(seconds: float) -> str:
    """Format seconds as `0:01:05`."""
    return str(timedelta(seconds=int(seconds)))
