"""Asking a run to stop: what a signal sets, and the loop reads."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    """Whether somebody asked to stop."""

    requested: bool = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Within this, a first SIGINT or SIGTERM asks to stop at the end of the step; a second one ends at once."""
    stop = Stop()

    def handle(number: int, _: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
