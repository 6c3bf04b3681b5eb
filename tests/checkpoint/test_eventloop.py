"""If reading one array of a checkpoint fails, the other reads finish before their event loop closes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest
import uvloop
from folders import SMALL, run_folder

from jaxgpt.checkpoint import eventloop
from jaxgpt.checkpoint.run import Run, describe
from jaxgpt.config import UserError
from jaxgpt.lm import load

MAKERS = (asyncio.new_event_loop, uvloop.new_event_loop)


@pytest.mark.parametrize("module", [asyncio, uvloop])
def test_a_loop_finishes_its_tasks_before_it_closes(module) -> None:  # type: ignore[no-untyped-def]
    ended = []

    async def slow() -> None:
        await asyncio.sleep(0.01)
        ended.append("slow")

    async def failing() -> None:
        raise ArithmeticError

    async def both() -> None:
        await asyncio.gather(slow(), failing())

    with eventloop.loops_that_finish():
        loop: asyncio.AbstractEventLoop = module.new_event_loop()
    with pytest.raises(ArithmeticError):
        loop.run_until_complete(both())
    assert not ended
    loop.close()
    assert ended == ["slow"]
    assert loop.is_closed()
    loop.close()  # closing twice has no effect, as for any loop
    assert (asyncio.new_event_loop, uvloop.new_event_loop) == MAKERS


def test_the_last_reader_restores_the_original() -> None:
    first, second = eventloop.loops_that_finish(), eventloop.loops_that_finish()
    with contextlib.ExitStack() as stack:
        stack.enter_context(second)
        with first:
            stack.close()
            assert asyncio.new_event_loop not in MAKERS, "the first reader is still active"
    assert (asyncio.new_event_loop, uvloop.new_event_loop) == MAKERS


@pytest.mark.parametrize("turns", range(1, 9))
def test_every_exception_is_retrieved(turns: int) -> None:
    """Also one raised while the loop closes; asyncio logs exceptions that are never retrieved."""

    async def failing(after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        raise ArithmeticError

    async def both() -> None:
        await asyncio.gather(failing(0), failing(turns))

    heard: list[dict[str, object]] = []
    with eventloop.loops_that_finish():
        loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    with pytest.raises(ArithmeticError):
        loop.run_until_complete(both())
    loop.close()
    gc.collect()
    assert not heard


def test_orbax_reads_in_such_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[set[asyncio.Task[object]]] = []

    class Watched(eventloop._Loop):
        def close(self) -> None:
            super().close()
            left.append(asyncio.all_tasks(self))

    run = Run(run_folder(tmp_path / "run", SMALL))
    describe(run, run.config().with_model(n_inner=16), run.tokenizer())
    monkeypatch.setattr(eventloop, "_Loop", Watched)
    with pytest.raises(UserError, match=r"ValueError: Requested shape: .* is not compatible with the stored shape"):
        load(run.path)
    assert left
    assert not any(left)
