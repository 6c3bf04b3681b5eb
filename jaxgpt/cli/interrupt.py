"""Ctrl-C that ends a command at once, even while the main thread is in native code and Python cannot raise."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from jaxgpt.trainer.signals import watch_signals

INTERRUPTED = 130  # exit code after SIGINT, by convention
GRACE = 1.0  # seconds for an orderly end
M_ARENA_MAX = -8  # of malloc.h
END_LIVE = b"\r\x1b[2K\x1b[?25h"  # erase the live line, and show the cursor that it has hidden


@contextmanager
def interruptible() -> Iterator[None]:
    """Within this, SIGINT ends the process `GRACE` seconds later, should KeyboardInterrupt not have ended the block by then.

    Not where a command has a handler of its own, as training has.
    """
    _use_one_heap()
    ended = threading.Event()

    def react(number: int, _: bool) -> None:
        ours = number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler
        if ours and not ended.wait(GRACE):
            end_now("interrupted")

    with watch_signals(react):
        try:
            yield
        finally:
            ended.set()


def _use_one_heap() -> None:
    """Let all threads allocate from the process's first heap.

    glibc otherwise gives each thread a heap of at most 64 MB, and it does so for good once there are two. A training step
    whose memory comes from such a heap has nine times the page faults and takes a tenth longer, whatever
    `parallel.keep_memory` sets later; so this comes before the first thread.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def end_now(words: str = "") -> NoReturn:
    """End the process from any thread, without waiting for the others or for native code.

    Files are safe: all that jaxgpt writes appears whole or not at all.
    """
    with suppress(OSError, ValueError, AttributeError):  # a stream may be closed
        if words:
            print(f"jaxgpt: {words}", file=sys.stderr, flush=True)
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
                os.write(stream.fileno(), END_LIVE)
    os._exit(INTERRUPTED)
