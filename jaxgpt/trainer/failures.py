"""Failures: explain divergence, exhausted memory, I/O and compiler errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.run import Run
from jaxgpt.errors import TrainingFailed, WriteFailed, full_disk_fix, one_line
from jaxgpt.trainer.divergence import Diverged
from jaxgpt.trainer.program import Program


@contextmanager
def failures(run: Run, program: Program) -> Iterator[None]:
    """Raise divergence, I/O errors and exhausted memory as `TrainingFailed`, with the last saved step."""
    fix = ""
    try:
        yield
    except OSError as e:
        reason = f"{e.filename or run.path}: {e.strerror or e}"
        fix = full_disk_fix(e)
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        reason = explain_failure(program, e)
    except MemoryError as e:
        reason = out_of_host_memory(e)
        fix = "use a smaller model or batch, or a machine with more memory"
    except Diverged as e:
        reason = str(e)
        fix = "a lower --optim.learning-rate may help"
    except WriteFailed as e:
        reason = str(e)
        fix = full_disk_fix(e.cause)
    except TrainingFailed as e:
        reason = str(e)
    else:
        return
    advice = f" ({fix})" if fix else ""
    raise TrainingFailed(f"{reason}: stopped, {kept_checkpoint_message(run.checkpoints)}{advice}")


@contextmanager
def evaluating(program: Program, step: int) -> Iterator[None]:
    """Raise exhausted memory in an evaluation as `TrainingFailed`, with the setting that helps."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        reason = f"out of device memory in the evaluation at step {step} ({mesh_shape(program)}): {one_line(e, 300)}"
    except MemoryError as e:
        reason = f"{out_of_host_memory(e)} in the evaluation at step {step}"
    else:
        return
    size = program.config.train.eval_batch_size or program.microbatches.rows
    raise TrainingFailed(f"{reason}; lower --train.eval-batch-size, now {size}") from None


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Return whether XLA could not allocate memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def out_of_host_memory(error: MemoryError) -> str:
    """Describe exhausted memory of the host."""
    details = one_line(error, 100)
    return f"out of memory on the host ({details})" if details else "out of memory on the host"


def mesh_shape(program: Program) -> str:
    """Return the axes of the mesh and their sizes, as in "mesh data 2 x fsdp 1"."""
    return "mesh " + " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())


def explain_failure(program: Program, error: jax.errors.JaxRuntimeError) -> str:
    """Explain a failure of XLA in one line, with the settings that may help."""
    message = one_line(error, 300)
    shape = mesh_shape(program)
    if is_out_of_memory(error):
        return (
            f"out of device memory (--train.accumulation {program.config.train.accumulation}, {shape}): {message}; "
            "raise --train.accumulation, set --train.remat dots or full, or shard the weights with --mesh.data 1 "
            "--mesh.fsdp -1"
        )
    return (
        f"the compiler failed on this step ({shape}): {message}; try mesh sizes that are powers of two, "
        "--train.attention xla, or a different version of jax"
    )
