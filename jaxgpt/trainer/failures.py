"""Failures of a run: what failed, the checkpoint that is kept, and the settings that may help, in one line.

`divergence.py` detects divergence; the errors of I/O, memory and XLA are explained here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.run import Run
from jaxgpt.errors import TrainingFailed, WriteFailed, full_disk_fix, one_line
from jaxgpt.out_of_memory import MORE_HOST_MEMORY, is_out_of_device_memory, out_of_host_memory
from jaxgpt.trainer.divergence import Diverged
from jaxgpt.trainer.program import Program


class _Explanation(NamedTuple):
    """The reason for a failure, and what may help; "": unknown, or included in the reason."""

    reason: str
    fix: str = ""


@contextmanager
def failures(run: Run, program: Program) -> Iterator[None]:
    """Raise divergence, I/O errors and exhausted memory as `TrainingFailed`, with the checkpoint that is kept."""
    try:
        yield
    except Exception as e:
        explanation = _explain(e, run, program)
        if explanation is None:
            raise
        advice = f" ({explanation.fix})" if explanation.fix else ""
        kept = kept_checkpoint_message(run.checkpoints)
        raise TrainingFailed(f"{explanation.reason}: stopped, {kept}{advice}") from e


def _explain(error: Exception, run: Run, program: Program) -> _Explanation | None:
    """Explain an error of a run; return None if the error is not of a kind that `failures` raises as `TrainingFailed`."""
    match error:
        case OSError():
            return _Explanation(f"{error.filename or run.path}: {error.strerror or error}", full_disk_fix(error))
        case jax.errors.JaxRuntimeError() if is_out_of_device_memory(error):
            return _Explanation(explain_failure(program, error))
        case MemoryError():
            return _Explanation(out_of_host_memory(error), MORE_HOST_MEMORY)
        case Diverged():
            return _Explanation(str(error), "a lower --optim.learning-rate may help")
        case WriteFailed():
            return _Explanation(str(error), full_disk_fix(error.cause))
        case TrainingFailed():
            return _Explanation(str(error))
    return None


@contextmanager
def evaluating(program: Program, step: int) -> Iterator[None]:
    """Raise exhausted memory in an evaluation as `TrainingFailed`, with the setting that may help."""
    size = program.config.train.eval_batch_size or program.batches.microbatches.rows
    fix = f"lower --train.eval-batch-size, now {size}"
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_device_memory(e):
            raise
        reason = f"out of device memory in the evaluation at step {step} ({mesh_shape(program)}): {one_line(e, 300)}"
        raise TrainingFailed(f"{reason}; {fix}") from None
    except MemoryError as e:
        reason = f"{out_of_host_memory(e)} in the evaluation at step {step}"
        raise TrainingFailed(f"{reason}; {fix}") from None


def mesh_shape(program: Program) -> str:
    """Return the axes of the mesh and their sizes, as in "mesh data 2 x fsdp 1"."""
    return "mesh " + " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())


def explain_failure(program: Program, error: jax.errors.JaxRuntimeError) -> str:
    """Explain exhausted device memory, or a failed compilation, in one line, with the settings that may help."""
    message = one_line(error, 300)
    shape = mesh_shape(program)
    if is_out_of_device_memory(error):
        return (
            f"out of device memory (--train.accumulation {program.config.train.accumulation}, {shape}): {message}; "
            "raise --train.accumulation, set --train.remat dots or full, or shard the weights with --mesh.data 1 "
            "--mesh.fsdp -1"
        )
    return (
        f"the compiler failed on this step ({shape}): {message}; try mesh sizes that are powers of two, "
        "--train.attention xla, or a different version of jax"
    )
