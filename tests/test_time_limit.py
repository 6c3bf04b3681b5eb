"""A call with a time limit ends in time, and leaves no alarm."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

from jaxgpt.time_limit import TimeLimitReached, call_within


def test_a_limit_that_ends_with_its_function_leaves_no_alarm() -> None:
    """An alarm may arrive between the end of the function and the reset of the timer."""
    end = 0.0

    def busy() -> None:
        while time.perf_counter() < end:
            pass

    for turn in range(4000):
        end = time.perf_counter() + 4e-5 + 5e-9 * turn
        with suppress(TimeLimitReached):
            call_within(5e-5, busy)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
