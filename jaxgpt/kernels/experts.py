"""Experts that compute only the chosen pairs of token and expert, and drop none: equals of `ops.experts.experts`.

Letters in names: E experts of a device, A active experts of a token, X pairs of token and expert, n tiles, t rows of a tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.kernels.devices import logical_spec
from jaxgpt.ops import Array, experts
from jaxgpt.ops.experts import ExpertWeights, mlp_of

TILE = 64  # rows of a tile

Activation = Callable[[Array], Array]
Product = Callable[[Array, Any], Array]  # (rows, stack of matrices) -> rows: each row times the matrix of its expert


def ragged_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts by `jax.lax.ragged_dot`, which TPUs multiply group by group."""
    return _dropless(_by_groups, x_BTD, choice_BTA, share_BTA, weights, activate, dtype)


def tiled_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts by tiles of rows that share an expert, where `ragged_dot` would compute every expert: CPUs."""
    return _dropless(_by_tiles, x_BTD, choice_BTA, share_BTA, weights, activate, dtype)


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

    A few tokens read the matrices of their experts only. Otherwise stored weights, and meshes that shard positions or
    experts, use the definition.
    """
    B, T, A = choice_BTA.shape
    E = weights.up_EDF.shape[0]
    x_BTD = x_BTD.astype(dtype)
    rules: dict[str, Any] = dict(nn.get_logical_axis_rules())
    on_mesh = bool(rules) and not jax.sharding.get_abstract_mesh().empty
    if B * T * A <= E and not on_mesh:
        return _by_token(x_BTD, choice_BTA, share_BTA, weights, activate, dtype)
    if not isinstance(weights.up_EDF, Array) or rules.get("length") or rules.get("expert"):
        return experts.experts(x_BTD, choice_BTA, share_BTA, weights, activate, dtype)

    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    compute = functools.partial(local, activate=activate)
    if not on_mesh:
        return compute(x_BTD, choice_BTA, share_BTA, weights).astype(dtype)

    def on_device(x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights) -> Array:
        y_BTD = compute(x_BTD, choice_BTA, share_BTA, weights)
        # Each device has the terms of its part of the MLP's width: add them.
        width = rules.get("mlp")
        if width:
            y_BTD = jax.lax.psum(y_BTD, width)
        return y_BTD.astype(dtype)

    tokens = logical_spec("batch")
    widen = logical_spec(None, None, "mlp")
    narrow = logical_spec(None, "mlp", None)
    of_weights = ExpertWeights(widen, narrow, None if weights.gate_EDF is None else widen)
    # check_vma=False: ragged products do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(on_device, in_specs=(tokens, tokens, tokens, of_weights), out_specs=tokens, check_vma=False)
    return divided(x_BTD, choice_BTA, share_BTA, weights)


def _by_token(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Multiply each token by the matrices of its experts, one pair after the other, without reading other experts."""
    B, T, D = x_BTD.shape
    A = choice_BTA.shape[-1]
    x_X1D = jnp.repeat(x_BTD.reshape(-1, 1, D), A, axis=0)

    def apply(pair: tuple[Array, Array]) -> Array:
        x_1D, expert = pair
        y_1D: Array = mlp_of(x_1D, expert, weights, activate, dtype)
        return y_1D

    y_X1D = jax.lax.map(apply, (x_X1D, choice_BTA.reshape(-1)))
    y_BTAD = y_X1D.reshape(B, T, A, D).astype(jnp.float32)
    return (share_BTA[..., None] * y_BTAD).sum(2).astype(dtype)


def _mlp(x: Array, weights: ExpertWeights, activate: Activation, product: Product) -> Array:
    """Apply the MLP of its expert to each row."""
    up = product(x, weights.up_EDF)
    if weights.gate_EDF is None:
        h = activate(up)
    else:
        h = activate(product(x, weights.gate_EDF)) * up
    return product(h, weights.down_EFD)


def _by_groups(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation
) -> Array:
    """Sort the pairs by expert, and multiply consecutive groups by their matrices: float32 `[B, T, D]`."""
    B, T, D = x_BTD.shape
    A = choice_BTA.shape[-1]
    E = len(weights.up_EDF)
    expert_X = choice_BTA.reshape(-1)
    order_X = jnp.argsort(expert_X, stable=True)
    size_E = jnp.bincount(expert_X, length=E).astype(jnp.int32)
    x_XD = x_BTD.reshape(-1, D)[order_X // A]
    y_XD = _mlp(x_XD, weights, activate, lambda x, w: jax.lax.ragged_dot(x, w, size_E))

    # Back to the order of the tokens; add the terms of each token.
    back_X = jnp.argsort(order_X)
    y_BTAD = y_XD[back_X].reshape(B, T, A, D).astype(jnp.float32)
    return (share_BTA[..., None] * y_BTAD).sum(2)


def _by_tiles(x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation) -> Array:
    """Pad each expert's rows to whole tiles, and multiply each tile by the matrix of its expert: float32 `[B, T, D]`.

    There are at most E tiles more than the rows fill, so the number of tiles is static, and no row is dropped.
    """
    B, T, D = x_BTD.shape
    A = choice_BTA.shape[-1]
    slot_X, expert_n = _slots(choice_BTA.reshape(-1), len(weights.up_EDF))
    token_X = jnp.arange(len(slot_X)) // A
    x_XD = x_BTD.reshape(-1, D)[token_X]
    rows = jnp.zeros((len(expert_n) * TILE, D), x_BTD.dtype)
    x_ntD = rows.at[slot_X].set(x_XD, unique_indices=True).reshape(-1, TILE, D)
    y_ntD = _mlp(x_ntD, weights, activate, lambda x_ntI, w_EIO: _tile_product(x_ntI, w_EIO, expert_n))
    y_BTAD = y_ntD.reshape(-1, D)[slot_X].reshape(B, T, A, D).astype(jnp.float32)
    return (share_BTA[..., None] * y_BTAD).sum(2)


def _slots(expert_X: Array, E: int) -> tuple[Array, Array]:
    """Return the row of each pair in the padded layout, int32 `[X]`, and the expert of each tile, `[n]`."""
    # The tiles of an expert are consecutive: as many as its pairs need.
    size_E = jnp.bincount(expert_X, length=E)
    tiles_E = -(-size_E // TILE)
    first_tile_E = jnp.cumsum(tiles_E) - tiles_E

    # Rank each pair among the pairs of its expert, in the order of the tokens.
    order_X = jnp.argsort(expert_X, stable=True)
    sorted_X = expert_X[order_X]
    begin_E = jnp.cumsum(size_E) - size_E
    rank_X = jnp.arange(len(expert_X)) - begin_E[sorted_X]
    slot_X = jnp.zeros_like(order_X).at[order_X].set(first_tile_E[sorted_X] * TILE + rank_X)

    count = math.ceil(len(expert_X) / TILE) + E
    expert_n = jnp.searchsorted(first_tile_E, jnp.arange(count), side="right") - 1
    return slot_X, jnp.clip(expert_n, 0, E - 1)


@jax.custom_vjp
def _tile_product(x_ntI: Array, w_EIO: Array, expert_n: Array) -> Array:
    """Multiply each tile by the matrix of its expert: `[n, t, O]`."""

    def multiply(tile: tuple[Array, Array]) -> Array:
        x_tI, expert = tile
        return x_tI @ w_EIO[expert]

    return jax.lax.map(multiply, (x_ntI, expert_n))


def _tile_product_forward(x_ntI: Array, w_EIO: Array, expert_n: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _tile_product(x_ntI, w_EIO, expert_n), (x_ntI, w_EIO, expert_n)


def _tile_product_backward(saved: tuple[Array, Array, Array], dy_ntO: Array) -> tuple[Array, Array, None]:
    x_ntI, w_EIO, expert_n = saved

    def multiply(tile: tuple[Array, Array]) -> Array:
        dy_tO, expert = tile
        return dy_tO @ w_EIO[expert].T

    def add(dw_EIO: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        # One matrix of the gradient changes in each iteration, in place.
        x_tI, dy_tO, expert = tile
        dw_IO = jnp.einsum("tI,tO->IO", x_tI, dy_tO, preferred_element_type=jnp.float32)
        return dw_EIO.at[expert].add(dw_IO), None

    dx_ntI = jax.lax.map(multiply, (dy_ntO, expert_n))
    dw_EIO, _ = jax.lax.scan(add, jnp.zeros(w_EIO.shape, jnp.float32), (x_ntI, dy_ntO, expert_n))
    return dx_ntI, dw_EIO.astype(w_EIO.dtype), None


_tile_product.defvjp(_tile_product_forward, _tile_product_backward)
