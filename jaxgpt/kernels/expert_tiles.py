"""Experts in tiles: rows with the same expert, padded to whole tiles, and one product for each tile.

Letters in names: E experts of this device, A active experts of a token, R tokens, X = R * A pairs of token and expert, n tiles,
t rows of a tile, M = n * t rows of all tiles, I and O inputs and outputs of a matrix.
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

    x_MD = _tokens_to_rows(pairs.x_BTD.reshape(-1, D), layout, A)
    x_ntD = x_MD.reshape(n, t, D)
    y_ntD = mlp_of_rows(x_ntD, weights, activate, lambda x, w: _tile_product(x, w, layout.expert_n, used))

    # Restore the order of the tokens, and add the terms of each token.
    y_XD = _rows_to_pairs(y_ntD.reshape(-1, D), layout)
    return weighted_sum(y_XD.astype(jnp.float32), pairs.share_BTA)


def tiles_of(pairs: int, E: int, largest: int) -> tuple[int, int]:
    """Return the number of tiles for pairs with E experts, and the rows of a tile: a power of 2 from `TILE` to `largest`.

    Padding adds up to a tile for each expert. Except with the smallest tiles, this is at most a quarter of the pairs.
    """
    t = TILE
    while 2 * t <= largest and E * 2 * t <= pairs / 4:
        t *= 2
    return math.ceil(pairs / t) + E, t


class _Layout(NamedTuple):
    """The pairs in the M rows of all tiles; tiles with pairs come first. Indices are int32.

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

    Example: X = 6 pairs with E = 3 experts, in tiles of t = 4 rows; the last two of the n = 5 tiles have no pairs.

        expert_X  0 2 0 0 0 0  ->  size_E 5 0 1, tiles_E 2 0 1, first_tile_E 0 2 2
        row_X     0 8 1 2 3 4
        pair_M    0 2 3 4 | 5 6 6 6 | 1 6 6 6 | 6 6 6 6 | 6 6 6 6
        expert_n  0       | 0       | 2       | 2       | 2

    Args:
        expert_X: the expert of each pair; E for the pairs of other devices.
        own_X: whether the expert of each pair is on this device.
        E: number of experts of this device.
        n: number of tiles.
        t: rows of a tile.
    """
    X = len(expert_X)
    M = n * t

    # The tiles of an expert are consecutive, and as few as its pairs fit into.
    size_E = jnp.bincount(expert_X, length=E)
    tiles_E = -(-size_E // t)
    first_tile_E = jnp.cumsum(tiles_E) - tiles_E
    # An expert without tiles has the same first tile as the next expert: of equal values, `right` finds the last.
    expert_n = jnp.searchsorted(first_tile_E, jnp.arange(n), side="right") - 1

    row_X = first_tile_E[expert_X] * t + _rank(expert_X, size_E)
    row_X = jnp.where(own_X, row_X, M)
    # Invert `row_X`. The pairs of other devices have the row M, beyond the last, so they are dropped.
    pair_M = jnp.full(M, X, row_X.dtype).at[row_X].set(jnp.arange(X, dtype=row_X.dtype), mode="drop")
    return _Layout(row_X, pair_M, expert_n, filled=tiles_E.sum())


def _rank(expert_X: Array, size_E: Array) -> Array:
    """Return the number of earlier pairs with the same expert, for each pair; any number for pairs of other devices."""
    order_X = jnp.argsort(expert_X, stable=True)
    begin_E = jnp.cumsum(size_E) - size_E
    rank_in_order_X = jnp.arange(len(expert_X)) - begin_E[expert_X[order_X]]
    return jnp.zeros_like(order_X).at[order_X].set(rank_in_order_X)


# JAX's derivatives of the next two functions would add each row to an array of zeros. The custom derivatives read rows, like
# the functions themselves: a row has at most one pair, and a pair at most one row, so `pair_M` and `row_X` invert each other.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _tokens_to_rows(x_RD: Array, layout: _Layout, A: int) -> Array:
    """Copy each token to the rows of its pairs: `[M, D]`; padding is 0. Pair i is of token `i // A`."""
    token_M = layout.pair_M // A  # R for padding: beyond the last token
    return _read(jnp.asarray(x_RD), token_M)


def _tokens_to_rows_backward(A: int, layout: _Layout, dx_MD: Array) -> tuple[Array, None]:
    dx_XD = _read(dx_MD, layout.row_X)
    dx_RAD = dx_XD.reshape(-1, A, dx_MD.shape[-1])
    return dx_RAD.sum(1, dtype=jnp.float32).astype(dx_MD.dtype), None


_tokens_to_rows.defvjp(lambda x_RD, layout, A: (_tokens_to_rows(x_RD, layout, A), layout), _tokens_to_rows_backward)


@jax.custom_vjp
def _rows_to_pairs(y_MD: Array, layout: _Layout) -> Array:
    """Return the row of each pair: `[X, D]`; 0 for pairs of other devices."""
    return _read(y_MD, layout.row_X)


def _rows_to_pairs_backward(layout: _Layout, dy_XD: Array) -> tuple[Array, None]:
    return _read(dy_XD, layout.pair_M), None


_rows_to_pairs.defvjp(lambda y_MD, layout: (_rows_to_pairs(y_MD, layout), layout), _rows_to_pairs_backward)


def _read(x: Array, index: Array) -> Array:
    """Return the rows of x at indices; 0 for an index beyond the last row."""
    return x.at[index].get(mode="fill", fill_value=0)


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
