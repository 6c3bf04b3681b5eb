"""A call with a time limit: an alarm of the process ends the call."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


class TimeLimitReached(BaseException):
    """A call reached its time limit. A BaseException, so that `except Exception` in the called function does not catch it."""


def call_within(seconds: float, function: Callable[[], Any]) -> Any:
    """Call a function; raise `TimeLimitReached` if it takes longer than `seconds`. Works only in the main thread (SIGALRM).

    Unlike waiting for a thread, an alarm also ends a regular expression, which holds the interpreter's lock. After the limit,
    the alarm repeats every second, in case a bare `except` in the function has caught the exception.
    """
    is_running = True

    def expire(number: int, frame: object) -> None:
        if is_running:
            raise TimeLimitReached

    previous = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            return function()
        finally:
            is_running = False
    finally:  # even if an alarm arrives between the end of the function and the previous line
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)
