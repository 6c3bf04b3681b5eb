"""Signals are handled at once, whatever the main thread is doing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
import time

import pytest
import uvloop

from jaxgpt.trainer.signals import stop_on_signal


def test_a_signal_is_handled_while_native_code_runs() -> None:
    told: list[tuple[int, bool, float]] = []
    with stop_on_signal(lambda number, again: told.append((number, again, time.monotonic()))) as stop:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        # Native code that Python cannot interrupt and that releases the GIL, like a compiler or waiting for a device.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 600_000)
        ended = time.monotonic()
    assert stop.requested
    [(number, again, when)] = told
    assert (number, again) == (signal.SIGTERM, False)
    assert when - began < (ended - began) / 2


def test_a_second_signal_raises() -> None:
    told: list[tuple[int, bool]] = []
    done = threading.Event()

    def react(number: int, again: bool) -> None:
        told.append((number, again))
        if again:
            done.set()

    def twice() -> None:
        with stop_on_signal(react):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert done.wait(5)
    assert told == [(signal.SIGINT, False), (signal.SIGTERM, True)]


@pytest.mark.parametrize("makes_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_signal_during_an_event_loop_is_reported_once(makes_loop) -> None:  # type: ignore[no-untyped-def]
    """Orbax runs event loops, which take over the wakeup descriptor."""
    told: list[tuple[int, bool]] = []
    first = threading.Event()

    def react(number: int, again: bool) -> None:
        told.append((number, again))
        first.set()

    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signal(react) as stop:
        loop = makes_loop()
        loop.run_until_complete(interrupted())
        loop.close()
        assert first.wait(5)
        time.sleep(0.05)
        assert told == [(signal.SIGTERM, False)]
        assert stop.requested
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor is the interpreter's again"
