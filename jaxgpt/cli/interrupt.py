"""End a command on Ctrl-C, even while the main thread is in native code, where Python cannot raise KeyboardInterrupt."""

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
GRACE = 1.0  # seconds for an orderly exit
M_ARENA_MAX = -8  # from malloc.h
END_LIVE = b"\r\x1b[2K\x1b[?25h"  # erase the live line and show the cursor again


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process `GRACE` seconds after SIGINT if KeyboardInterrupt has not ended the block by then.

    Does nothing while a command has its own handler for SIGINT, as training does.
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
    """Make all threads allocate from the main heap.

    By default glibc gives each thread its own heap of at most 64 MB, and this cannot be undone once a second heap exists.
    A training step that allocates from such a heap has nine times the page faults and takes 10 % longer, whatever
    `parallel.keep_memory` sets later. Call this before the first thread starts.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def end_now(words: str = "") -> NoReturn:
    """Exit from any thread, without waiting for other threads or native code.

    This cannot corrupt files: jaxgpt writes every file atomically.
    """
    with suppress(OSError, ValueError, AttributeError):  # a stream may be closed
        if words:
            print(f"jaxgpt: {words}", file=sys.stderr, flush=True)
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
                os.write(stream.fileno(), END_LIVE)
    os._exit(INTERRUPTED)
