"""Prefetch: prepare batches in a thread while the devices compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")
_Call = tuple[A, Future[T]]  # the argument of a call, and its result

LEAVING = 5.0  # maximum seconds to wait for the thread at the end, for example if a file system hangs
EVERY = 0.1  # seconds between two calls of `stopping`


@contextmanager
def prefetched(function: Callable[[A], T], arguments: Iterable[A]) -> Iterator[Iterator[tuple[A, Future[T]]]]:
    """Yield an iterator of (argument, future result), computing the next result in a thread.

    An exception of `function` is raised by the future of the failed call. The thread is a daemon, so that a call that hangs
    does not keep the process alive.
    """
    calls = SimpleQueue[_Call[A, T] | None]()
    submitted: list[Future[T]] = []  # results that the caller has not received

    def submit(argument: A) -> _Call[A, T]:
        future = Future[T]()
        submitted.append(future)
        calls.put((argument, future))
        return argument, future

    def results() -> Iterator[_Call[A, T]]:
        # Submit the next call before yielding a call, so that the thread computes it while the caller uses the result.
        started = map(submit, arguments)
        ahead = next(started, None)
        while ahead:
            current = ahead
            ahead = next(started, None)
            yield current
            _, received = current
            submitted.remove(received)

    thread = threading.Thread(target=_work, args=(function, calls), name="batches", daemon=True)
    thread.start()
    try:
        yield results()
    finally:
        for future in submitted:
            future.cancel()
        calls.put(None)
        thread.join(LEAVING)


def _work(function: Callable[[A], T], calls: SimpleQueue[_Call[A, T] | None]) -> None:
    """Call the function with each argument in the queue; return when the queue contains None."""
    while True:
        call = calls.get()
        if call is None:
            return
        argument, future = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(argument))
        except BaseException as e:
            future.set_exception(e)


def wait_for(future: Future[T], stopping: Callable[[], bool]) -> None:
    """Wait for a result, or until `stopping` returns True."""
    while not future.done() and not stopping():
        wait([future], EVERY)
