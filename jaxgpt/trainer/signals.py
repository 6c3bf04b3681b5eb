"""Asking a run to stop: what a signal sets, and the loop reads."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

HANDLED = 0x80  # added to a signal's number by its Python handler, to tell its byte from the interpreter's own


@dataclass
class Stop:
    """Whether somebody asked to stop."""

    requested: bool = False


@contextmanager
def stop_on_signal(react: Callable[[int, bool], None] = lambda number, again: None) -> Iterator[Stop]:
    """Turn a first SIGINT or SIGTERM into a request to stop after the step; a second one raises KeyboardInterrupt.

    Args:
        react: called with the signal's number and whether it is a second one, at once and in another thread. The exception
            has to wait until the main thread leaves native code: the compiler, or a wait for the device.
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
    """Call `react` as `stop_on_signal` does, and leave the handlers of signals as they are."""
    with _watch(react):
        yield


@contextmanager
def _watch(react: Callable[[int, bool], None]) -> Iterator[socket.socket]:
    """A thread that reads the numbers of signals from a socket; yields the socket's other end.

    The interpreter writes a signal's number there at once (`signal.set_wakeup_fd`), whatever the main thread is doing, and
    runs the handler when the main thread is back in Python. An event loop that runs in the main thread borrows the
    interpreter's descriptor, but then the handler runs at once: it writes, too, and either tells of the signal.
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
