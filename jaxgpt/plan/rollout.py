"""Estimate a rollout: the answers that a model generates before the steps that learn from them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import row_shards
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.estimate import argument_bytes, extrapolated, gathered, shard_elements, token_flops
from jaxgpt.plan.residuals import Work, abstract_program, one_device
from jaxgpt.plan.topology import Topology


def rollout(config: Config, topology: Topology, work: Work) -> StepCost:
    """Estimate the generation of the answers of a rollout, and the pass that computes their probabilities.

    The time is a lower bound: each decoding step reads the weights, gathered along fsdp, and the cache of the answers once, and
    prompts are empty. Memory holds the train state, a copy of the weights in the compute dtype, and a cache of whole windows.

    Args:
        config: settings of the step, with a resolved mesh.
        topology: the hardware.
        work: objective and batches of a step, with answers.
    """
    assert work.answers is not None
    layers = config.model.n_layer
    one, two = (abstract_program(config, topology.target, work, n) for n in (1, 2))

    extrapolate = partial(extrapolated, layers=layers)
    state = jax.tree.map(extrapolate, argument_bytes(one, work), argument_bytes(two, work))
    width = jnp.dtype(config.train.compute_dtype).itemsize
    copied = width * extrapolate(shard_elements(one.abstract_weights), shard_elements(two.abstract_weights))
    read = width * extrapolate(gathered(one), gathered(two))

    # The rows and the key/value heads of a device. An axis of the mesh that does not divide them replicates the cache.
    ways = row_shards(sizes_of(config.mesh))
    rows = work.answers.rows // ways if work.answers.rows % ways == 0 else work.answers.rows
    part = one_device(config).model
    slot = 2 * width * part.kv_heads * part.head_width  # bytes of the keys and values of a token in a layer
    slots = config.window * layers

    # Slots that the steps read: n in step n, except beyond sliding windows.
    tokens = work.answers.tokens
    seen = sum(_sum_up_to(min(window or tokens, tokens), tokens) for window in config.model.windows)
    scored = rows * config.window * (2 if work.frozen else 1)
    flops = rows * tokens * token_flops(config, tokens) / 3 + scored * token_flops(config, config.window) / 3
    memory = {kind: state[kind] for kind in state if kind != "batch"}
    memory |= {"weights for decoding": copied, "cache": slot * rows * slots}
    moved = tokens * read + slot * rows * seen
    return StepCost(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=flops,
        hbm_bytes=moved,
        least={"memory": moved},
    )


def _sum_up_to(window: int, steps: int) -> float:
    """Sum `min(n, window)` over the steps n = 1 ... `steps`."""
    return window * (window + 1) / 2 + (steps - window) * window
