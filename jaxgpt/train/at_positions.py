"""Compute functions of hidden states and targets in chunks of positions, or only at answers, to hold fewer logits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.ops.sharding import shards


def at_positions(
    function: Callable[[jax.Array, jax.Array], Any],
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    chunk: int = 0,
    longest: int = 0,
) -> Any:
    """Compute `function(x_BTD, targets_BT)`, a tree of arrays `[B, T]`, optionally in chunks or only at answers.

    Args:
        function: a function of each position separately, such as the loss of the logits.
        x_BTD: hidden states.
        targets_BT: targets, negative if not counted.
        chunk: positions of each row to compute at a time (`chunked`); 0: all.
        longest: maximum number of consecutive positions that contain all targets of a row. Only `longest`
            positions are computed, and the other results are 0 (`at_answers`), unless positions are sharded. 0: all positions.
    """

    def at_all(x_BTD: jax.Array, targets_BT: jax.Array) -> Any:
        return chunked(function, x_BTD, targets_BT, chunk) if chunk else function(x_BTD, targets_BT)

    if computes_only_answers(longest, targets_BT.shape[1]):
        return at_answers(at_all, x_BTD, targets_BT, longest)
    return at_all(x_BTD, targets_BT)


def computes_only_answers(longest: int, T: int) -> bool:
    """Return whether logits are computed only at answers of up to `longest` tokens (0: unknown), in windows of T tokens."""
    return 0 < longest < T and shards("length") == 1


def at_answers(
    function: Callable[[jax.Array, jax.Array], Any], x_BTD: jax.Array, targets_BT: jax.Array, longest: int
) -> Any:
    """Compute `function(x_BTD, targets_BT)`, a tree of arrays `[B, T]`, only at A consecutive positions with all targets.

    A is `longest`. The positions start at the first target, or are the last A positions of the row if these include the first
    target. The results are 0 at all other positions.
    """
    T = targets_BT.shape[1]
    first_B = jnp.minimum(jnp.argmax(targets_BT >= 0, -1), T - longest)
    place_BA = first_B[:, None] + jnp.arange(longest)[None]
    x_BAD = jnp.take_along_axis(x_BTD, place_BA[..., None], 1)
    targets_BA = jnp.take_along_axis(targets_BT, place_BA, 1)
    found_BA = function(x_BAD, targets_BA)

    # Move the results to their positions in the row.
    index_BT = jnp.arange(T)[None] - first_B[:, None]
    is_inside_BT = (index_BT >= 0) & (index_BT < longest)

    def spread(x_BA: jax.Array) -> jax.Array:
        x_BT = jnp.take_along_axis(x_BA, jnp.clip(index_BT, 0, longest - 1), 1)
        return jnp.where(is_inside_BT, x_BT, 0.0)

    return jax.tree.map(spread, found_BA)


def chunked(
    function: Callable[[jax.Array, jax.Array], Any], x_BTD: jax.Array, targets_BT: jax.Array, chunk: int
) -> Any:
    """Compute `function(x_BTD, targets_BT)`, a tree of arrays `[B, T]`, for `chunk` positions of each row at a time.

    Memory holds B x chunk x V logits instead of B x T x V. The backward pass recomputes the logits, at the cost of one
    more product with the head. The last chunk is padded with targets that are not counted. If positions are sharded, each
    device computes an equal share of every chunk.
    """
    B, T, D = x_BTD.shape
    P = math.gcd(shards("length"), T)  # number of shards of a row
    S = T // P  # positions of a shard
    chunk = min(math.ceil(chunk / P), S)
    fill = -S % chunk

    # Split each shard into n chunks of c positions, and join the chunks of all shards.
    x_BPSD = jnp.pad(x_BTD.reshape(B, P, S, D), ((0, 0), (0, 0), (0, fill), (0, 0)))
    x_nBPcD = jnp.moveaxis(x_BPSD.reshape(B, P, -1, chunk, D), 2, 0)
    x_nBcD = x_nBPcD.reshape(-1, B, P * chunk, D)
    targets_BPS = jnp.pad(targets_BT.reshape(B, P, S), ((0, 0), (0, 0), (0, fill)), constant_values=-1)
    targets_nBPc = jnp.moveaxis(targets_BPS.reshape(B, P, -1, chunk), 2, 0)
    targets_nBc = targets_nBPc.reshape(-1, B, P * chunk)

    @jax.checkpoint
    def one_chunk(each: tuple[jax.Array, jax.Array]) -> Any:
        x_BcD, targets_Bc = each
        return function(x_BcD, targets_Bc)

    def join(y_nBc: jax.Array) -> jax.Array:
        y_BPnc = jnp.moveaxis(y_nBc.reshape(-1, B, P, chunk), 0, 2)
        y_BPS = y_BPnc.reshape(B, P, -1)[:, :, :S]
        return y_BPS.reshape(B, T)

    results_nBc = jax.lax.map(one_chunk, (x_nBcD, targets_nBc))
    return jax.tree.map(join, results_nBc)
