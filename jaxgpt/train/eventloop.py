"""Event loops that end what they have begun.

Orbax reads arrays side by side in a loop of its own, and closes that at the first array that cannot be read. The others
then find it closed, and print so on standard error, a trace for each, beside the one line that says what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop


class _Loop(uvloop.Loop):
    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def loops_that_finish() -> Iterator[None]:
    """Loops made in here close only when all their tasks have ended, by a result or an error."""
    makers = [(module, module.new_event_loop) for module in (asyncio, uvloop)]
    for module, _ in makers:
        module.new_event_loop = _Loop  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, make in makers:
            module.new_event_loop = make  # type: ignore[attr-defined]
