"""Experts in tiles: rows with the same expert, padded to whole tiles, and one product for each tile.

Letters in names as in `kernels/experts.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.kernels.expert_pairs import Pairs, mlp_of_rows, own_experts, weighted_sum
from jaxgpt.ops import Array
from jaxgpt.ops.activations import Activation
from jaxgpt.ops.experts import ExpertWeights

TILE = 64  # rows of a tile on CPUs, and the minimum on GPUs
GPU_TILE = 512  # maximum number of rows of a tile on GPUs


def by_tiles(pairs: Pairs, weights: ExpertWeights, activate: Activation, first: Array | None, *, largest: int) -> Array:
    """Compute the terms of a device's experts, as `expert_pairs.OnDevice`, in tiles: float32 `[B, T, D]`.

    Each expert's rows are padded to whole tiles, and each tile is multiplied by the matrix of its expert. The number of tiles
    is static: as many as all pairs fill, plus E for padding. This is always enough, so no row is dropped. If other devices have
    other experts, only the tiles with pairs are multiplied, but all tiles are in memory.

    Args:
        pairs: the tokens and their experts.
        weights: the matrices of the E experts.
        activate: activation function of the MLP.
        first: index of the first of the E experts; None: the device has all experts.
        largest: maximum number of rows of a tile.
    """
    A = pairs.choice_BTA.shape[-1]
    D = pairs.x_BTD.shape[-1]
    E = len(weights.up_EDF)
    expert_X, own_X = own_experts(pairs.choice_BTA, first, E)
    n, t = tiles_of(pairs.choice_BTA.size, E, largest)
    layout = _layout(expert_X, own_X, E, n, t)
    # A device with all experts has at most E tiles without pairs: it multiplies them too.
    has_all_experts = first is None
    used = None if has_all_experts else layout.filled

    def product(x_ntI: Array, w_EIO: Array) -> Array:
        y_ntO: Array = _tile_product(x_ntI, w_EIO, layout.expert_n, used)
        return y_ntO

    # Copy each token to the rows of its pairs.
    x_MD = _take(pairs.x_BTD.reshape(-1, D), layout.pair_M, layout.row_X, A)
    x_ntD = x_MD.reshape(n, t, D)
    y_ntD = mlp_of_rows(x_ntD, weights, activate, product)

    # Restore the order of the tokens, and add the terms of each token.
    y_XD = _take(y_ntD.reshape(-1, D), layout.row_X, layout.pair_M, 1)
    return weighted_sum(y_XD.astype(jnp.float32), pairs.share_BTA)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take(x_RD: Array, index_M: Array, inverse_X: Array, copies: int) -> Array:
    """Return the rows `x_RD[index_M // copies]`: `[M, D]`; zeros for indices beyond the last row.

    `by_tiles` copies tokens to the rows of tiles, and then rows back, with the two index arrays exchanged. The derivative reads
    the gradient at the inverse indices. JAX's derivative would add each row to an array of zeros.

    Args:
        x_RD: R rows; X = R * copies.
        index_M: indices from 0 to X; each index below X occurs at most once.
        inverse_X: position of each index in `index_M`; M: no position.
        copies: number of consecutive indices that mean the same row.
    """
    return jnp.asarray(x_RD).at[index_M // copies].get(mode="fill", fill_value=0)


def _take_backward(copies: int, inverse_X: Array, dy_MD: Array) -> tuple[Array, None, None]:
    dy_XD = dy_MD.at[inverse_X].get(mode="fill", fill_value=0)
    dx_RD = dy_XD.reshape(-1, copies, dy_MD.shape[-1]).sum(1, dtype=jnp.float32)
    return dx_RD.astype(dy_MD.dtype), None, None


_take.defvjp(
    lambda x_RD, index_M, inverse_X, copies: (_take(x_RD, index_M, inverse_X, copies), inverse_X),
    _take_backward,
)


def tiles_of(pairs: int, E: int, largest: int) -> tuple[int, int]:
    """Return the number of tiles for pairs with E experts, and the rows of a tile: a power of 2 from `TILE` to `largest`.

    Padding adds up to a tile for each expert. Except with the smallest tiles, this is at most a quarter of the pairs.
    """
    t = TILE
    while 2 * t <= largest and E * 2 * t <= pairs / 4:
        t *= 2
    return math.ceil(pairs / t) + E, t


class _Layout(NamedTuple):
    """The M rows of all tiles; tiles with pairs come first. Indices are int32.

    Attributes:
        row_X: row of each pair; M for the pairs of other devices.
        pair_M: pair of each row; X for padding.
        expert_n: expert of each tile.
        filled: number of tiles with pairs, a scalar.
    """

    row_X: Array
    pair_M: Array
    expert_n: Array
    filled: Array


def _layout(expert_X: Array, own_X: Array, E: int, n: int, t: int) -> _Layout:
    """Return the layout of pairs in tiles.

    Args:
        expert_X: the expert of each pair; E for the pairs of other devices.
        own_X: whether the expert of each pair is on this device.
        E: number of experts of this device.
        n: number of tiles.
        t: rows of a tile.
    """
    # The tiles of an expert are consecutive, and as few as its pairs fit into.
    size_E = jnp.bincount(expert_X, length=E)
    tiles_E = -(-size_E // t)
    first_tile_E = jnp.cumsum(tiles_E) - tiles_E

    # Rank each pair among the pairs of its expert, in the order of the tokens.
    order_X = jnp.argsort(expert_X, stable=True)
    sorted_X = expert_X[order_X]
    begin_E = jnp.cumsum(size_E) - size_E
    rank_X = jnp.arange(len(expert_X)) - begin_E[sorted_X]
    row_X = jnp.zeros_like(order_X).at[order_X].set(first_tile_E[sorted_X] * t + rank_X)

    expert_n = jnp.searchsorted(first_tile_E, jnp.arange(n), side="right") - 1
    filled = tiles_E.sum()

    # Invert `row_X`. Pairs of other devices have a row beyond the last, so they are dropped.
    X = len(expert_X)
    row_X = jnp.where(own_X, row_X, n * t)
    pair_M = jnp.full(n * t, X, row_X.dtype).at[row_X].set(jnp.arange(X, dtype=row_X.dtype), mode="drop")
    return _Layout(row_X, pair_M, expert_n, filled)


@jax.custom_vjp
def _tile_product(x_ntI: Array, w_EIO: Array, expert_n: Array, used: Array | None) -> Array:
    """Multiply each tile by the matrix of its expert: `[n, t, O]`.

    The derivative is custom, because JAX's derivative of the loop would add a complete gradient `[E, I, O]` for each tile.

    Args:
        x_ntI: tiles of rows.
        w_EIO: matrix of each expert.
        expert_n: expert of each tile.
        used: number of tiles to multiply, starting at the first; the products of the others are 0. None: all tiles.
    """

    def multiply(tile: tuple[Array, Array]) -> Array:
        x_tI, expert = tile
        return x_tI @ w_EIO[expert]

    return _map_tiles(multiply, (x_ntI, expert_n), used)


def _map_tiles(function: Callable[[Any], Array], tiles: Any, used: Array | None) -> Array:
    """Apply a function to the first `used` tiles, and stack the results; results of other tiles are 0. None: all tiles."""

    def tile(i: Any) -> Any:
        return jax.tree.map(lambda x: x[i], tiles)

    def write(i: Array, results: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(results, function(tile(i)), i, 0)

    result = jax.eval_shape(function, tile(0))
    array, *_ = jax.tree.leaves(tiles)
    n = len(array)
    zeros = _zeros((n, *result.shape), result.dtype, after=array)
    return jax.lax.fori_loop(0, n if used is None else used, write, zeros)


def _zeros(shape: tuple[int, ...], dtype: Any, after: Array) -> Array:
    """Return zeros that depend on an array: otherwise XLA for GPUs creates the zeros of all layers when a step begins."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), dtype), after))
    return jnp.broadcast_to(zero, shape)


def _tile_product_forward(
    x_ntI: Array, w_EIO: Array, expert_n: Array, used: Array | None
) -> tuple[Array, tuple[Array, Array, Array, Array | None]]:
    return _tile_product(x_ntI, w_EIO, expert_n, used), (x_ntI, w_EIO, expert_n, used)


def _tile_product_backward(
    saved: tuple[Array, Array, Array, Array | None], dy_ntO: Array
) -> tuple[Array, Array, None, None]:
    x_ntI, w_EIO, expert_n, used = saved

    def multiply(tile: tuple[Array, Array]) -> Array:
        dy_tO, expert = tile
        return dy_tO @ w_EIO[expert].T

    def add(i: Array, dw_EIO: Array) -> Array:
        # One matrix of the gradient changes in each iteration, in place.
        dw_IO = jnp.einsum("tI,tO->IO", x_ntI[i], dy_ntO[i], preferred_element_type=jnp.float32)
        return dw_EIO.at[expert_n[i]].add(dw_IO)

    dx_ntI = _map_tiles(multiply, (dy_ntO, expert_n), used)
    count = len(expert_n) if used is None else used
    dw_EIO = jax.lax.fori_loop(0, count, add, _zeros(w_EIO.shape, jnp.float32, after=dy_ntO))
    return dx_ntI, dw_EIO.astype(w_EIO.dtype), None, None


_tile_product.defvjp(_tile_product_forward, _tile_product_backward)
