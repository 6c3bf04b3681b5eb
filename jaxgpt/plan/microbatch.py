"""Trace a microbatch of one device: the bytes that its forward pass saves for the backward pass, and its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax

from jaxgpt.config import Config
from jaxgpt.kernels import Target
from jaxgpt.kernels.expert_tiles import GPU_TILE, tiles_of
from jaxgpt.ops.random import named_key
from jaxgpt.plan.abstract import abstract_program, batch_of
from jaxgpt.plan.flops import count_flops
from jaxgpt.plan.residuals import residual_arrays
from jaxgpt.plan.work import NEXT_TOKEN, Work


class Trace(NamedTuple):
    """The costs of one microbatch on one device, found by tracing."""

    saved: float  # bytes of the arrays in device memory that the forward pass saves for the backward pass
    largest: float  # bytes of the largest saved array
    of_pairs: float  # bytes of the saved arrays with a row for each pair of token and expert
    flops: float  # FLOPs of matrix products and attention kernels, with recomputation


@cache
def trace(config: Config, target: Target, work: Work = NEXT_TOKEN, layers: int = 0, remat: bool = True) -> Trace:
    """Trace a microbatch of one device, forward and backward.

    Args:
        config: settings of a run, from `one_device`.
        target: kind of the device.
        work: objective and batches of a step.
        layers: number of layers; 0: the config's number.
        remat: whether to rematerialize as configured.
    """
    if not remat:
        config = replace(config, train=replace(config.train, remat="none"))
    program = abstract_program(config, target, work, layers)
    key = named_key(0, "dropout") if config.model.dropout > 0 else None

    def total(params: Any, frozen: Any, batch: Any) -> jax.Array:
        return program.pure_step.objective(params, batch, key, frozen).minimized.sum()

    def residuals(params: Any, frozen: Any, batch: Any) -> Any:
        _, backward = jax.vjp(lambda params: total(params, frozen, batch), params)
        return backward  # a tree of arrays: the residuals

    arguments = program.abstract.state.params, program.abstract.frozen, batch_of(program, work)
    unsharded = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments)
    forward = jax.make_jaxpr(residuals)(*unsharded).jaxpr
    both_passes = jax.make_jaxpr(jax.grad(total))(*unsharded).jaxpr
    arrays = residual_arrays(forward)
    sizes = [_bytes(array) for array in arrays]

    # The trace has complete windows; a device has an equal share of their positions.
    context = config.mesh.context
    return Trace(
        saved=sum(sizes) / context,
        largest=max(sizes, default=0.0) / context,
        of_pairs=_pair_bytes(arrays, config, target, work) / context,
        flops=count_flops(both_passes) / context,
    )


def _bytes(array: Any) -> float:
    """Return the bytes of an array, from its shape and dtype."""
    return float(math.prod(array.shape) * array.dtype.itemsize)


def _pair_bytes(arrays: Sequence[Any], config: Config, target: Target, work: Work) -> float:
    """Sum the bytes of the arrays with a row for each pair of token and expert."""
    if not config.model.n_experts:
        return 0.0
    pairs = config.train.batch_size * work.windows * config.window * config.model.experts_per_token
    tiles = _tiles(target, pairs, config.model.n_experts)
    first_axes = {(pairs,), tiles, (math.prod(tiles),)}  # possible first axes of the arrays with a row for each pair
    total = 0.0
    for array in arrays:
        if any(array.shape[: len(axes)] == axes for axes in first_axes):
            total += _bytes(array)
    return total


def pair_rows(target: Target, pairs: int, experts: int) -> int:
    """Return the number of rows that the kernel of experts stores for pairs of token and expert, including padding.

    Args:
        target: kind of the device.
        pairs: number of pairs.
        experts: number of experts on a device.
    """
    return math.prod(_tiles(target, pairs, experts))


def _tiles(target: Target, pairs: int, experts: int) -> tuple[int, ...]:
    """Return the axes of the rows: number of tiles and rows of a tile on GPUs, otherwise the number of pairs."""
    return tiles_of(pairs, experts, GPU_TILE) if target.platform == "gpu" else (pairs,)
