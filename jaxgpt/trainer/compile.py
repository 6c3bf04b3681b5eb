"""Compile the train step while the state is initialized."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax

from jaxgpt.errors import UserError
from jaxgpt.parallel.processes import is_peer_failure
from jaxgpt.trainer.failures import explain_failure
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.report import Report


@contextmanager
def compiling(program: Program, report: Report) -> Iterator[None]:
    """Compile the train step in a thread while the block initializes the state.

    On exit, the context waits for the compiler, even after an error, and raises the compiler's error.
    """
    began = time.perf_counter()
    report.stage("compiling")
    batches = program.batch(program.config.train.steps_per_call)
    state, *_ = program.abstract_state, program.abstract_frozen, program._numbers  # lowering traces in this thread
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lambda: compile_lowered(program, program.lower(state, batches)))
        yield
        compiled.result()
    report.stage("")
    report.compiled(time.perf_counter() - began)


def compile_lowered(program: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile the result of `Program.lower`. Raises `UserError`, with advice, if the compiler fails."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if is_peer_failure(e):
            raise
        raise UserError(explain_failure(program, e)) from None
