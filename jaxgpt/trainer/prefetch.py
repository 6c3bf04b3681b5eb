"""Prefetch: prepare batches in a thread while the devices compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")


@contextmanager
def prefetched(function: Callable[[A], T], arguments: Iterable[A]) -> Iterator[Iterator[tuple[A, T]]]:
    """Yield an iterator of (argument, result), computing the next result in a thread.

    An exception of `function` is raised when the result of the failed call is taken.
    """
    pool = ThreadPoolExecutor(1, "batches")

    def results() -> Iterator[tuple[A, T]]:
        calls = ((argument, pool.submit(function, argument)) for argument in arguments)
        ahead = next(calls, None)
        while ahead:
            (argument, result), ahead = ahead, next(calls, None)
            yield argument, result.result()

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)
