"""Equivalents of `ops.experts.experts` that compute only the chosen pairs of token and expert, and drop no pair.

Letters in names: E experts (in functions of one device, its experts), A active experts of a token, X pairs of token and
expert, n tiles, t rows of a tile, M rows of all tiles, I and O inputs and outputs of a matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.kernels.devices import logical_spec, mesh_axes, on_mesh
from jaxgpt.ops import Array
from jaxgpt.ops.activations import Activation
from jaxgpt.ops.experts import ExpertWeights, mlp_of
from jaxgpt.ops.experts import experts as definition
from jaxgpt.ops.sharding import constrain

TILE = 64  # rows of a tile on CPUs, and least number on GPUs
GPU_TILE = 512  # maximum number of rows of a tile on GPUs

# Logical axes of arrays on the devices. The model's width is None, because it is gathered for the products.
TOKENS = ("batch", "length")
WIDENING = ("expert", None, "mlp")
NARROWING = ("expert", "mlp", None)

Product = Callable[[Array, Any], Array]  # (rows, stack of matrices) -> rows: each row times the matrix of its expert


def ragged_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts with `jax.lax.ragged_dot`: the default on TPUs, where it multiplies group by group.

    On CPUs and GPUs, `ragged_dot` would multiply every row by the matrices of all experts.
    """
    return _dropless(_by_groups, x_BTD, choice_BTA, share_BTA, weights, activate, dtype)


def tiled_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts in tiles of 64 rows with the same expert: the default on CPUs."""
    local = functools.partial(_by_tiles, largest=TILE)
    return _dropless(local, x_BTD, choice_BTA, share_BTA, weights, activate, dtype)


def large_tiled_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts in tiles of up to 512 rows with the same expert: the default on GPUs.

    The products of larger tiles occupy more of a GPU, and are fewer.
    """
    local = functools.partial(_by_tiles, largest=GPU_TILE)
    return _dropless(local, x_BTD, choice_BTA, share_BTA, weights, activate, dtype)


def _dropless(
    local: Callable[..., Array],
    x_BTD: Array,
    choice_BTA: Array,
    share_BTA: Array,
    weights: ExpertWeights,
    activate: Activation,
    dtype: Any,
) -> Array:
    """Compute the experts, on each device for its rows and its part of the MLP's width.

    - With at most E pairs on one device, as in decoding, only the matrices of their experts are read (`_by_token`).
    - Stored weights use the definition, as do rules that shard positions over the mesh axes of experts or of the MLP's width.
    - One device computes all pairs (`local`).
    - On a mesh, each device computes the terms of its matrices, and the devices add their terms.

    Devices along the axis of the experts exchange their tokens: an all-gather before, a reduce-scatter after. For R tokens of
    all e devices, a device sends `R * D * (e - 1) / e` numbers each way, outputs in float32, tokens and all gradients in
    `dtype`. An all-to-all would send up to `A * R * D / e`: not less if a token has as many experts as the axis has devices.

    The axis thus divides the weights of a device by e, but not its memory for rows: `R * A`, one per pair (`_by_groups`,
    `_by_tiles`).
    """
    E = weights.up_EDF.shape[0]
    x_BTD = x_BTD.astype(dtype)
    if choice_BTA.size <= E and not on_mesh():
        return _by_token(x_BTD, choice_BTA, share_BTA, weights, activate, dtype)
    if not isinstance(weights.up_EDF, Array) or (on_mesh() and _shards_positions()):
        return definition(x_BTD, choice_BTA, share_BTA, weights, activate, dtype)

    compute = functools.partial(local, activate=activate)
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    if not on_mesh():
        return compute(x_BTD, choice_BTA, share_BTA, weights, first=0).astype(dtype)
    return _on_mesh(compute, x_BTD, choice_BTA, share_BTA, weights)


def _shards_positions() -> bool:
    """Return whether the rules shard positions over the mesh axes of experts or of the MLP's width."""
    length_axes = mesh_axes(logical_spec(*TOKENS), 1)
    return not {*length_axes}.isdisjoint(_term_axes())


def _term_axes() -> tuple[str, ...]:
    """Return the mesh axes that shard experts or the MLP's width: their devices compute different terms of a row."""
    widen = logical_spec(*WIDENING)
    return *mesh_axes(widen, 0), *mesh_axes(widen, 2)


def _on_mesh(
    compute: Callable[..., Array], x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights
) -> Array:
    """Compute the terms of each device's matrices, and add the terms of all devices, in the dtype of `x_BTD`.

    Devices with terms of the same rows add them (`equal`); devices with different rows exchange the rows first (`exchanged`).
    """
    tokens = logical_spec(*TOKENS)
    widen = logical_spec(*WIDENING)
    narrow = logical_spec(*NARROWING)
    expert_axes = mesh_axes(widen, 0)
    row_axes = mesh_axes(tokens, 0)
    exchanged = tuple(axis for axis in _term_axes() if axis in row_axes)
    equal = tuple(axis for axis in _term_axes() if axis not in row_axes)
    E = weights.up_EDF.shape[0]

    # Gather the cast weights along fsdp: without the constraint, XLA would gather float32 and cast the result.
    widening = ("expert", "embed", "mlp")
    weights = ExpertWeights(
        up_EDF=constrain(weights.up_EDF, widening),
        down_EFD=constrain(weights.down_EFD, ("expert", "mlp", "embed")),
        gate_EDF=None if weights.gate_EDF is None else constrain(weights.gate_EDF, widening),
    )

    def on_device(x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights) -> Array:
        first: Any = 0
        if len(weights.up_EDF) < E:
            first = jax.lax.axis_index(expert_axes) * len(weights.up_EDF)
        if exchanged:
            gather = functools.partial(jax.lax.all_gather, axis_name=exchanged, tiled=True)
            x_BTD = gather(x_BTD)
            choice_BTA = gather(choice_BTA)
            share_BTA = gather(share_BTA)
        y_BTD = compute(x_BTD, choice_BTA, share_BTA, weights, first=first)
        added_BTD: Array = _added(y_BTD, exchanged, equal, x_BTD.dtype)
        return added_BTD

    of_weights = ExpertWeights(widen, narrow, None if weights.gate_EDF is None else widen)
    # check_vma=False: ragged products do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(on_device, in_specs=(tokens, tokens, tokens, of_weights), out_specs=tokens, check_vma=False)
    return divided(x_BTD, choice_BTA, share_BTA, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _added(y_BTD: Array, exchanged: tuple[str, ...], equal: tuple[str, ...], dtype: Any) -> Array:
    """Add float32 terms over devices, and return the rows of this device in a dtype.

    Gradients are gathered in this dtype, without rounding. Devices of `equal` have equal gradients, so their sum needs no
    collective.

    Args:
        y_BTD: terms of the rows of all devices along `exchanged`.
        exchanged: mesh axes of devices with different rows.
        equal: mesh axes of devices with the same rows.
        dtype: dtype of the result.
    """
    # Scatter before the sum, so that the sum has fewer rows.
    if exchanged:
        y_BTD = jax.lax.psum_scatter(y_BTD, exchanged, tiled=True)
    if equal:
        y_BTD = jax.lax.psum(y_BTD, equal)
    return y_BTD.astype(dtype)


def _added_backward(
    exchanged: tuple[str, ...], equal: tuple[str, ...], dtype: Any, _: None, dy_BTD: Array
) -> tuple[Array]:
    if exchanged:
        dy_BTD = jax.lax.all_gather(dy_BTD, exchanged, tiled=True)
    dy_BTD = dy_BTD.astype(jnp.float32)
    if equal:
        # `shard_map` gives each of these devices an equal share of the gradient; the derivative of a sum adds the shares.
        dy_BTD = dy_BTD * jax.lax.axis_size(equal)
    return (dy_BTD,)


_added.defvjp(lambda y_BTD, *static: (_added(y_BTD, *static), None), _added_backward)


def _by_token(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Multiply each token by the matrices of its experts in a loop, without reading other experts."""
    A = choice_BTA.shape[-1]
    D = x_BTD.shape[-1]
    x_X1D = jnp.repeat(x_BTD.reshape(-1, 1, D), A, axis=0)

    def apply(pair: tuple[Array, Array]) -> Array:
        x_1D, expert = pair
        y_1D: Array = mlp_of(x_1D, expert, weights, activate, dtype)
        return y_1D

    y_X1D = jax.lax.map(apply, (x_X1D, choice_BTA.reshape(-1)))
    return _weighted_sum(y_X1D.astype(jnp.float32), share_BTA).astype(dtype)


def _weighted_sum(y_XD: Array, share_BTA: Array) -> Array:
    """Add the outputs of each token's pairs, times their shares: `[B, T, D]`."""
    y_BTAD = y_XD.reshape(*share_BTA.shape, y_XD.shape[-1])
    return (share_BTA[..., None] * y_BTAD).sum(2)


def _mlp(x: Array, weights: ExpertWeights, activate: Activation, product: Product) -> Array:
    """Apply to each row the MLP of its expert."""
    up = product(x, weights.up_EDF)
    if weights.gate_EDF is None:
        h = activate(up)
    else:
        h = activate(product(x, weights.gate_EDF)) * up
    return product(h, weights.down_EFD)


def _own_experts(choice_BTA: Array, first: Any, E: int) -> tuple[Array, Array]:
    """Return the expert of each pair, counted from expert `first`, and whether it is one of the E experts starting there.

    For a pair with a different expert, the returned index is E.
    """
    expert_X = choice_BTA.reshape(-1) - first
    own_X = (expert_X >= 0) & (expert_X < E)
    return jnp.where(own_X, expert_X, E), own_X


def _by_groups(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, first: Any
) -> Array:
    """Compute the terms of the E experts starting at expert `first`: float32 `[B, T, D]`.

    The pairs are sorted by expert, and each group of pairs is multiplied by the matrix of its expert. Pairs with other experts
    come last, and belong to no group.
    """
    A = choice_BTA.shape[-1]
    D = x_BTD.shape[-1]
    E = len(weights.up_EDF)
    expert_X, own_X = _own_experts(choice_BTA, first, E)
    order_X = jnp.argsort(expert_X, stable=True)
    size_E = jnp.bincount(expert_X, length=E).astype(jnp.int32)

    # Rows without a group have undefined products and gradients; the masks keep them from the tokens.
    x_XD = jnp.where(own_X[order_X][:, None], x_BTD.reshape(-1, D)[order_X // A], 0)
    y_XD = _mlp(x_XD, weights, activate, lambda x, w: jax.lax.ragged_dot(x, w, size_E))

    # Restore the order of the tokens, and add the terms of each token.
    back_X = jnp.argsort(order_X)
    y_XD = jnp.where(own_X[:, None], y_XD[back_X].astype(jnp.float32), 0.0)
    return _weighted_sum(y_XD, share_BTA)


def _by_tiles(
    x_BTD: Array,
    choice_BTA: Array,
    share_BTA: Array,
    weights: ExpertWeights,
    activate: Activation,
    first: Any,
    largest: int,
) -> Array:
    """Compute the terms of the E experts starting at expert `first`: float32 `[B, T, D]`.

    Each expert's rows are padded to whole tiles, and each tile is multiplied by the matrix of its expert. The number of tiles
    is static: as many as all pairs fill, plus E for padding. This is always enough, so no row is dropped. If other devices have
    other experts, only the tiles with pairs are multiplied; the memory is for all tiles.

    Args:
        x_BTD: inputs.
        choice_BTA: the experts of each token.
        share_BTA: the share of each of these experts.
        weights: the matrices of the E experts.
        activate: activation function of the MLP.
        first: index of the first of the E experts: an int if a device has all experts.
        largest: maximum number of rows of a tile.
    """
    A = choice_BTA.shape[-1]
    D = x_BTD.shape[-1]
    E = len(weights.up_EDF)
    expert_X, own_X = _own_experts(choice_BTA, first, E)
    n, t = tiles_of(choice_BTA.size, E, largest)
    slot_X, expert_n, filled = _slots(expert_X, E, n, t)
    is_complete = isinstance(first, int)  # a device with all experts has at most E tiles without pairs
    used = None if is_complete else filled

    # The row of each pair, and the pair of each row: beyond the last for pairs of other devices, and for padding.
    X = len(slot_X)
    slot_X = jnp.where(own_X, slot_X, n * t)
    pair_M = jnp.full(n * t, X, slot_X.dtype).at[slot_X].set(jnp.arange(X, dtype=slot_X.dtype), mode="drop")

    # Copy each token to the rows of its pairs.
    x_MD = _take(x_BTD.reshape(-1, D), pair_M, slot_X, A)
    x_ntD = x_MD.reshape(n, t, D)
    y_ntD = _mlp(x_ntD, weights, activate, lambda x_ntI, w_EIO: _tile_product(x_ntI, w_EIO, expert_n, used))

    # Restore the order of the tokens, and add the terms of each token.
    y_XD = _take(y_ntD.reshape(-1, D), slot_X, pair_M, 1)
    return _weighted_sum(y_XD.astype(jnp.float32), share_BTA)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take(x_RD: Array, index_M: Array, inverse_X: Array, copies: int) -> Array:
    """Return the rows `x_RD[index_M // copies]`: `[M, D]`; zeros for indices beyond the last row.

    The derivative reads the gradient at the inverse indices. JAX's derivative would add each row to an array of zeros.

    Args:
        x_RD: R rows; X = R * copies.
        index_M: indices from 0 to X, each below X at most once.
        inverse_X: position of each index in `index_M`; M: no position.
        copies: number of consecutive indices that mean the same row.
    """
    return x_RD.at[index_M // copies].get(mode="fill", fill_value=0)


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


def _slots(expert_X: Array, E: int, n: int, t: int) -> tuple[Array, Array, Array]:
    """Return the row of each pair in the padded layout, the expert of each tile, and the number of tiles with pairs.

    Pairs with the expert E, of another device, have an arbitrary row.

    Args:
        expert_X: the expert of each pair, from 0 to E.
        E: number of experts of this device.
        n: number of tiles.
        t: rows of a tile.

    Returns:
        Rows, int32 `[X]`; experts, int32 `[n]`; number of tiles, int32. Tiles with pairs come first.
    """
    # Each expert has as many consecutive tiles as its pairs need.
    size_E = jnp.bincount(expert_X, length=E)
    tiles_E = -(-size_E // t)
    first_tile_E = jnp.cumsum(tiles_E) - tiles_E

    # Rank each pair among the pairs of its expert, in the order of the tokens.
    order_X = jnp.argsort(expert_X, stable=True)
    sorted_X = expert_X[order_X]
    begin_E = jnp.cumsum(size_E) - size_E
    rank_X = jnp.arange(len(expert_X)) - begin_E[sorted_X]
    slot_X = jnp.zeros_like(order_X).at[order_X].set(first_tile_E[sorted_X] * t + rank_X)

    expert_n = jnp.searchsorted(first_tile_E, jnp.arange(n), side="right") - 1
    return slot_X, expert_n, tiles_E.sum()


@jax.custom_vjp
def _tile_product(x_ntI: Array, w_EIO: Array, expert_n: Array, used: Array | None) -> Array:
    """Multiply each tile by the matrix of its expert: `[n, t, O]`.

    The derivative is custom, because JAX's derivative of the loop would add a complete gradient `[E, I, O]` for each tile.

    Args:
        x_ntI: tiles of rows.
        w_EIO: matrix of each expert.
        expert_n: expert of each tile.
        used: number of tiles to multiply, the first; the products of the others are 0. None: all tiles.
    """

    def multiply(tile: tuple[Array, Array]) -> Array:
        x_tI, expert = tile
        return x_tI @ w_EIO[expert]

    return _map_tiles(multiply, (x_ntI, expert_n), used)


def _map_tiles(of_tile: Callable[[Any], Array], tiles: Any, used: Array | None) -> Array:
    """Apply a function to the first `used` tiles, and stack the results; results of other tiles are 0. None: all tiles."""

    def tile(i: Any) -> Any:
        return jax.tree.map(lambda x: x[i], tiles)

    def add(i: Array, results: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(results, of_tile(tile(i)), i, 0)

    result = jax.eval_shape(of_tile, tile(0))
    first, *_ = jax.tree.leaves(tiles)
    zeros = _zeros((len(first), *result.shape), result.dtype, first)
    return jax.lax.fori_loop(0, len(first) if used is None else used, add, zeros)


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
    dw_EIO = jax.lax.fori_loop(0, count, add, _zeros(w_EIO.shape, jnp.float32, dy_ntO))
    return dx_ntI, dw_EIO.astype(w_EIO.dtype), None, None


_tile_product.defvjp(_tile_product_forward, _tile_product_backward)
