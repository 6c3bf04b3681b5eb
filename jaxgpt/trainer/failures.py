"""Failures: explain divergence, exhausted memory, I/O and compiler errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxgpt.checkpoint.index import kept_checkpoint_message
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import ModelConfig
from jaxgpt.errors import TrainingFailed, UserError, WriteFailed, full_disk_fix, one_line
from jaxgpt.model.params import flatten_params, weights
from jaxgpt.parallel.processes import is_peer_failure
from jaxgpt.trainer.program import Program

# End of a path, after the (first) module: "/kernel" in "h_0/attn/q_proj/kernel", and of adapters that share A,
# "+v_proj/a" in "h_0/attn/q_proj+v_proj/a" and "+v_proj/b/v_proj" in "h_0/attn/q_proj+v_proj/b/v_proj".
LEAF = re.compile(r"(\+[^/]+)?/(a|b/[^/]+|[^/]+)$")


class Diverged(TrainingFailed):
    """The loss or the gradients diverged."""


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


def compile_lowered(program: Program, lowered: jax.stages.Lowered, options: Any = None) -> jax.stages.Compiled:
    """Compile the result of `Program.lower`. Raises `UserError`, with advice, if the compiler fails."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as e:
        if is_peer_failure(e):
            raise
        raise UserError(explain_failure(program, e)) from None


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


def first_non_finite(model: ModelConfig, params: Any, squared_norms: Sequence[float] | np.ndarray) -> str:
    """Describe the first non-finite gradient of the backward pass; return "" if all are finite.

    The description contains the gradient's path and the number of non-finite gradients, unless no gradient is finite, as when
    the loss is NaN.

    Args:
        model: the architecture.
        params: a tree with the structure of the trained parameters: weights, stacked weights or adapters.
        squared_norms: squared norms of the gradients, in the order of the leaves (`grad_squares` of the metrics).
    """
    paths = list(flatten_params(params))
    bad = [path for path, value in zip(paths, squared_norms, strict=True) if not np.isfinite(value)]
    if not bad:
        return ""
    if len(bad) == len(paths):
        return "and no gradient is finite"
    # The backward pass computes the modules in the reverse order of the forward pass, which is the order of `weights`.
    position = {LEAF.sub("", path): i for i, path in enumerate(weights(model))}

    def in_forward_order(path: str) -> tuple[int, str]:
        one_layer = re.sub(r"^h/", "h_0/", path)  # stacked weights: the first layer
        module = LEAF.sub("", one_layer)
        return position.get(module, len(position)), path

    first = max(bad, key=in_forward_order)
    return f"first in the backward pass in the gradient of {first} ({len(bad)} of {len(paths)} gradients)"
