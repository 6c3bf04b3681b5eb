"""Event loops that close only after their tasks have ended.

Orbax reads arrays concurrently in a loop of its own, asyncio's or (through its dependency uvloop) libuv's, and closes it
at the first array that cannot be read. The other tasks then fail, and Python prints a traceback for each on standard
error, beside the one line that says what is wrong. Orbax takes no loop as an argument, so the makers of loops are replaced
while it reads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop


class _Loop(uvloop.Loop):
    def close(self) -> None:
        if not self.is_closed():
            self.run_until_complete(_others())
        super().close()


async def _others() -> None:
    """Wait for all other tasks, and for the tasks awaiting them, which receive an error one iteration of the loop later."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*tasks, return_exceptions=True)


_MAKERS = [(module, module.new_event_loop) for module in (asyncio, uvloop)]
_lock = threading.Lock()
_readers = 0


@contextmanager
def loops_that_finish() -> Iterator[None]:
    """Make event loops that close only after all their tasks have ended; in any number of threads at once."""
    with _lock:
        _count(1)
    try:
        yield
    finally:
        with _lock:
            _count(-1)


def _count(change: int) -> None:
    global _readers
    _readers += change
    for module, make in _MAKERS:
        module.new_event_loop = _Loop if _readers else make  # type: ignore[attr-defined]
