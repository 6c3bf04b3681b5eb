"""Signals: inside `stop_on_signal`, the first signal requests a stop; outside, a signal ends the process with one line.

The thread of `exit_on_signals` ends the process even while native code runs. Two Ctrl-C in two seconds end it even inside
`stop_on_signal`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from jaxgpt.early_end import exit_now, with_advice
from jaxgpt.errors import INTERRUPTED

# Signals that request a stop: Ctrl-C, kill and Kubernetes, a closing terminal, warnings of schedulers before a time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
TWICE = 2.0  # maximum seconds between two presses of Ctrl-C that end the process
STOPPING = "jaxgpt: stopping after this step, then saving; press Ctrl-C again to stop now, without saving\n"


@dataclass
class Stop:
    """Whether a stop was requested.

    Attributes:
        requested: whether the main thread has handled a signal; it cannot handle signals inside native code.
        arrived: monotonic time of the first signal, or None; set even if the main thread is stuck in native code.
        repeated: whether a further signal came more than `TWICE` seconds after the first.
    """

    requested: bool = False
    arrived: float | None = None
    repeated: bool = False

    def count(self) -> None:
        """Record a signal. A closing terminal sends several signals at once, which count as one."""
        now = time.monotonic()
        if self.arrived is None:
            self.arrived = now
        elif now - self.arrived > TWICE:
            self.repeated = True


@dataclass
class _Process:
    """State of this process, shared by its signal handlers and the thread of `exit_on_signals`.

    Attributes:
        stop: request of the innermost `stop_on_signal`.
        is_watching: whether the thread of `exit_on_signals` receives all signals.
        ending: held while `_end` prints its line, so that only one thread prints it. Two Ctrl-C do not wait for it.
    """

    stop: Stop | None = None
    is_watching: bool = False
    ending: threading.RLock = field(default_factory=threading.RLock)


_process = _Process()


@contextmanager
def stop_on_signal(notice: str = STOPPING, signals: Sequence[int] = SIGNALS) -> Iterator[Stop]:
    """Turn signals into a request to stop; a SIGINT after the request raises KeyboardInterrupt.

    The first signal writes `notice` to standard error; later signals other than SIGINT are only counted, because a closing
    terminal sends SIGHUP several times. Signals that were ignored before, such as SIGHUP under `nohup`, stay ignored.
    Signal handlers can be set only in the main thread; in other threads, the handlers stay unchanged.
    """
    stop = Stop()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, partial(_request_stop, stop, notice))
    outer = _process.stop
    _process.stop = stop
    try:
        yield stop
    finally:
        _process.stop = outer
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that was not set in Python


def _request_stop(stop: Stop, notice: str, number: int, frame: object) -> None:
    """Handle a signal: request a stop and write `notice`; raise KeyboardInterrupt for a SIGINT after the request."""
    # The thread of `exit_on_signals`, if it runs, has counted the signal, perhaps long before this handler runs.
    if stop.arrived is None or not _process.is_watching:
        stop.count()
    if stop.requested:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        return
    stop.requested = True
    with suppress(OSError, AttributeError, ValueError):  # closed standard error
        line = f"\n{notice}" if sys.stderr.isatty() else notice  # newline after ^C or the progress line
        os.write(sys.stderr.fileno(), line.encode())  # reentrant, unlike print


def is_stop_requested() -> bool:
    """Return whether a signal has requested a stop in the innermost `stop_on_signal`."""
    return _process.stop is not None and _process.stop.requested


def exit_on_signals() -> None:
    """End the process with one line on a signal other than SIGINT, and on two SIGINT within two seconds.

    This works even inside XLA's compiler, while Python runs no signal handlers. A signal that `stop_on_signal` handles does
    not end the process, except the second SIGINT within two seconds. Signals that were ignored before stay ignored. Ending
    the process at any time is safe: a write is atomic, or the next command drops its incomplete part.
    """
    _process.is_watching = True
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # required by signal.set_wakeup_fd
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # not SIGINT, which raises KeyboardInterrupt
            signal.signal(number, _end)
    os.register_at_fork(after_in_child=restore_signals)  # a child would report its signals to this process
    threading.Thread(target=_watch, args=[receiver], daemon=True).start()


def interrupt_silently() -> None:
    """After `exit_on_signals`, let SIGINT end the process without a traceback.

    Call this after the command: exit handlers, such as JAX's, would print the KeyboardInterrupt as an ignored exception.
    """
    if _process.is_watching and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _watch(receiver: socket.socket) -> None:
    """Handle the signals that arrive at a socket, one byte for each: count them, or end the process."""
    pressed = -TWICE  # monotonic time of the last Ctrl-C
    while True:
        received = receiver.recv(1)
        if not received:  # the socket is closed
            return
        [number] = received
        stop = _process.stop  # the main thread may set the attribute to None meanwhile
        if stop is not None and number in SIGNALS:
            stop.count()
        if signal.getsignal(number) is _end:  # the main thread, in native code, may not call the handler
            _end(number, None)
        if number != signal.SIGINT:
            continue
        now = time.monotonic()
        if now - pressed < TWICE:
            exit_now(with_advice("interrupted"), INTERRUPTED)
        pressed = now


def _end(number: int, frame: object) -> NoReturn:
    """Handle a signal: print a line, and exit with the code that a shell gives a process killed by the signal."""
    with _process.ending:
        exit_now(with_advice(f"ended by {signal.Signals(number).name}"), 128 + number)


def restore_signals() -> None:
    """Undo `exit_on_signals`, in a process that forwards its signals and waits for other processes."""
    _process.is_watching = False
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)
