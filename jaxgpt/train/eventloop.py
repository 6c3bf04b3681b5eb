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
        if not self.is_closed():
            self.run_until_complete(_others())
        super().close()


async def _others() -> None:
    """Wait for all other tasks; and for those who wait for them, who are told of an error one turn of the loop later."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*tasks, return_exceptions=True)


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
