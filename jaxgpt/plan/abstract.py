"""Programs on absent devices, and the bytes and FLOPs of a step of a program, from the shapes of its arrays."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from jaxgpt.config import Config
from jaxgpt.counts import flops_per_token
from jaxgpt.kernels import Target, best
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.parallel.rules import AXES
from jaxgpt.plan.kernel import traceable
from jaxgpt.plan.one_device import token_flops
from jaxgpt.plan.shards import shard_bytes
from jaxgpt.plan.work import NEXT_TOKEN, Work
from jaxgpt.trainer.given import ProgramParts
from jaxgpt.trainer.program import Program

TPU = Target("tpu")


@cache
def abstract_program(config: Config, target: Target = TPU, work: Work = NEXT_TOKEN, layers: int = 0) -> Program:
    """Return the program on absent devices, which can be traced, but not compiled.

    Args:
        config: settings of the run, with a resolved mesh.
        target: kind of the devices. Their attention kernel is replaced by its shape (`plan.kernel`).
        work: objective and batches of a step.
        layers: number of layers; 0: the config's number.
    """
    if layers:
        config = config.with_model(n_layer=layers)
    mesh = AbstractMesh(tuple(sizes_of(config.mesh).values()), AXES)
    ops = best(config, target)
    ops = ops._replace(attend=traceable(ops.attend))
    return work.program(config, mesh, ProgramParts(ops=ops))


def batch_of(program: Program, work: Work = NEXT_TOKEN) -> Any:
    """Return the shapes of a batch of a step."""
    return program.batches.abstract(spec=work.rows() if work.rows else None)


def argument_bytes(program: Program, work: Work = NEXT_TOKEN) -> dict[str, float]:
    """Count the bytes of a step's inputs on one device, by kind."""
    state = program.abstract.state
    kinds = {
        "parameters": shard_bytes((state.params, program.abstract.frozen)),
        "optimizer": shard_bytes(state.opt_state),
    }
    if state.ema is not None:
        kinds["average"] = shard_bytes(state.ema)
    kinds["batch"] = shard_bytes(batch_of(program, work))
    return kinds


class StepFlops(NamedTuple):
    """FLOPs of a step on one device.

    Attributes:
        computed: FLOPs that the device computes, including padding and products that other devices repeat.
        useful: an equal share of the model's FLOPs.
    """

    computed: float
    useful: float


def step_flops(program: Program, work: Work = NEXT_TOKEN) -> StepFlops:
    """Compute the FLOPs of a step on one device with `flops_per_token`."""
    config = program.config
    tokens = config.window * work.windows  # tokens of a row

    # Padding is computed as well, and devices along tensor may repeat products.
    device_rows = math.prod(program.batches.microbatches) / batch_ways(program.mesh)
    device_tokens = tokens / config.mesh.context
    computed = device_tokens * device_rows * token_flops(config, config.window)

    per_token = flops_per_token(program.model, program.abstract.weights, config.window, config.lora)
    useful = per_token * config.train.batch_size / program.mesh.size
    return StepFlops(computed=computed, useful=tokens * useful)
