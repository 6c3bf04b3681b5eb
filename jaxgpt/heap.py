"""Memory of the process: garbage collection, and the heap of glibc."""

from __future__ import annotations

import ctypes
import gc
import sys

GARBAGE = 50_000  # number of new objects that triggers a garbage collection
# Option numbers from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8


def tune_memory() -> None:
    """Collect garbage rarely, and use one malloc arena for all threads; call this before threads start.

    Imports and tracing create millions of long-lived objects; at Python's default rate, scanning them for garbage takes 10% of
    the time to the first step. By default, glibc gives each thread an arena with heaps of at most 64 MB. A training step
    then has 8x the page faults and takes 10% longer. The malloc option has no effect once a second arena exists.
    """
    gc.set_threshold(GARBAGE)
    set_malloc({M_ARENA_MAX: 1})


def set_malloc(options: dict[int, int]) -> None:
    """Set options of glibc's malloc, keyed by number. Has no effect with a different C library."""
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        for number, value in options.items():
            libc.mallopt(number, value)


def trim_memory() -> None:
    """Return the free pages of glibc's heap to the kernel, in about 0.1 s. Has no effect with a different C library."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    """Return the C library of this process on Linux, otherwise None."""
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None
