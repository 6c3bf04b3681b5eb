"""Stop a run on a signal: the handler sets a flag that the loop reads."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

HANDLED = 0x80  # added to the signal number by the Python handler, to distinguish its byte from the interpreter's


@dataclass
class Stop:
    """Whether a stop was requested."""

    requested: bool = False


@contextmanager
def stop_on_signal(react: Callable[[int, bool], None] = lambda number, again: None) -> Iterator[Stop]:
    """Turn a first SIGINT or SIGTERM into a request to stop after the step; a second one raises KeyboardInterrupt.

    Args:
        react: called at once, in another thread, with the signal number and whether it is a second signal. The exception
            is raised only when the main thread leaves native code: the compiler, or a wait for the device.
    """
    stop = Stop()
    with _watch(react) as sender:

        def handle(number: int, _: Any) -> None:
            sender.send(bytes([number | HANDLED]))
            if stop.requested:
                raise KeyboardInterrupt
            stop.requested = True

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def watch_signals(react: Callable[[int, bool], None]) -> Iterator[None]:
    """Call `react` as `stop_on_signal` does, without changing the signal handlers."""
    with _watch(react):
        yield


@contextmanager
def _watch(react: Callable[[int, bool], None]) -> Iterator[socket.socket]:
    """Start a thread that reads signal numbers from a socket; yield the other end of the socket.

    The interpreter writes the number of a signal there at once (`signal.set_wakeup_fd`), whatever the main thread is doing, and
    runs the handler when the main thread is back in Python. An event loop in the main thread replaces the wakeup
    descriptor, but then the handler runs at once: it also writes, and either byte reports the signal.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # required of a wakeup descriptor

    def listen() -> None:
        seen = {0: 0, HANDLED: 0}
        with receiver:
            while byte := receiver.recv(1):
                before = max(seen.values())
                seen[byte[0] & HANDLED] += 1
                if max(seen.values()) > before:
                    react(byte[0] & ~HANDLED, before > 0)

    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True).start()
    try:
        yield sender
    finally:
        signal.set_wakeup_fd(previous)
        sender.close()
