"""Estimate a rollout: the answers that a model generates before the steps that learn from them."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import row_shards
from jaxgpt.plan.abstract import abstract_program, argument_bytes
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.counts import extrapolated
from jaxgpt.plan.one_device import forward_flops, one_device
from jaxgpt.plan.shards import shard_elements
from jaxgpt.plan.topology import Topology
from jaxgpt.plan.work import Work


def rollout(config: Config, topology: Topology, work: Work) -> StepCost:
    """Estimate the generation of the answers of a rollout, and the passes that compute their probabilities.

    The time is a lower bound: in each decoding step, a device reads its shards of weights and cache once, and prompts count as
    empty. Memory holds the train state, a copy of the weights in the compute dtype, and a cache of whole windows.

    Args:
        config: settings of the step, with a resolved mesh.
        topology: the hardware.
        work: objective and batches of a step, with answers.
    """
    answers = work.answers
    assert answers is not None, "only objectives with rollouts have answers"
    weights = _weights(config, topology, work)
    memory = {kind: size for kind, size in weights.train_state.items() if kind != "batch"}
    memory["weights for decoding"] = weights.copied

    # Count the answers of a device, with padding if the mesh does not divide their number.
    ways = row_shards(sizes_of(config.mesh))
    rows = math.ceil(answers.rows / ways)
    slot_bytes = _slot_bytes(config)
    memory["cache"] = slot_bytes * rows * config.window * config.model.n_layer

    # Decoding step n reads the weights and, in each layer, n slots, or as many as the sliding window if that is shorter.
    decode_steps = answers.tokens
    slots = sum(_sum_up_to(min(window or decode_steps, decode_steps), decode_steps) for window in config.model.windows)
    bytes_read = decode_steps * weights.copied + slot_bytes * rows * slots

    # Scoring is a forward pass over whole windows, sharded along context. The model scores the checked answers, and a
    # reference scores all answers. A teacher is part of the step instead.
    scored_rows = math.ceil(answers.checked / ways)
    if work.reference:
        scored_rows += rows
    scored_tokens = scored_rows * config.window / config.mesh.context
    decoding = rows * decode_steps * forward_flops(config, decode_steps)
    scoring = scored_tokens * forward_flops(config, config.window)
    return StepCost(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=decoding + scoring,
        hbm_bytes=bytes_read,
        # A decoding step reads these bytes with any program. The FLOPs include masked attention, which a program may omit.
        least={"memory": bytes_read},
    )


class WeightBytes(NamedTuple):
    """Bytes of the train state and of the weights for decoding, on each device."""

    train_state: dict[str, float]  # by kind, as in `StepCost.memory`
    copied: float  # shards of the copy in the compute dtype, which a decoding step reads


def _weights(config: Config, topology: Topology, work: Work) -> WeightBytes:
    """Extrapolate the bytes of the weights from one and two layers, which are faster to trace than all layers."""
    one = abstract_program(config, topology.target, work, 1)
    two = abstract_program(config, topology.target, work, 2)
    extrapolate = partial(extrapolated, layers=config.model.n_layer)
    element = _element_bytes(config)
    return WeightBytes(
        train_state=jax.tree.map(extrapolate, argument_bytes(one, work), argument_bytes(two, work)),
        copied=element * extrapolate(shard_elements(one.abstract.weights), shard_elements(two.abstract.weights)),
    )


def _slot_bytes(config: Config) -> int:
    """Return the bytes of a slot of the cache on a device: the keys and values of a token in a layer."""
    model = one_device(config).model  # with the heads of one device, because `tensor` shards the heads of the cache
    return 2 * _element_bytes(config) * model.kv_heads * model.head_width


def _element_bytes(config: Config) -> int:
    """Return the bytes of an element in the compute dtype."""
    return int(jnp.dtype(config.train.compute_dtype).itemsize)


def _sum_up_to(window: int, steps: int) -> float:
    """Sum `min(n, window)` over the steps n = 1 ... `steps`, for a window of at most `steps`."""
    return window * (window + 1) / 2 + (steps - window) * window
