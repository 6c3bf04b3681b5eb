"""Compilation of the train step, in a thread while the state is prepared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from jaxgpt.errors import UserError
from jaxgpt.parallel.processes import is_peer_failure
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.failures import explain_failure
from jaxgpt.trainer.feed import Feed
from jaxgpt.trainer.program import Program


@contextmanager
def compiling(program: Program, feed: Feed, listener: Listener) -> Iterator[Future[jax.stages.Compiled]]:
    """Compile the train step in a thread while the `with` block initializes or restores the state.

    On exit, the context waits for the compiler, and raises its error unless the block has raised an error.
    """
    began = time.perf_counter()
    listener.stage("compiling")
    batches = program.batches.abstract(program.config.train.steps_per_call, feed.spec)
    with ThreadPoolExecutor(1) as pool:

        def compile_step() -> jax.stages.Compiled:
            return compile_lowered(program, program.lower(program.abstract.state, batches))

        compiled = pool.submit(compile_step)
        yield compiled
        compiled.result()
    listener.stage("")
    listener.compiled(time.perf_counter() - began)


def compile_lowered(program: Program, lowered: jax.stages.Lowered, options: Any = None) -> jax.stages.Compiled:
    """Compile the result of `Program.lower`.

    Raises:
        UserError: with advice, if the compiler fails. An error due to the failure of a different process is raised unchanged.
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as e:
        if is_peer_failure(e):
            raise
        raise UserError(explain_failure(program, e)) from None
