"""Pairs of token and expert: their outputs token by token, or in groups of pairs with the same expert.

Letters in names as in `kernels/experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxgpt.ops import Array
from jaxgpt.ops.activations import Activation
from jaxgpt.ops.experts import ExpertWeights, mlp_of

Product = Callable[[Array, Any], Array]  # (rows, stack of matrices) -> rows: each row times the matrix of its expert


class Pairs(NamedTuple):
    """The tokens and their experts: A pairs of token and expert for each token.

    Attributes:
        x_BTD: inputs.
        choice_BTA: the experts of each token.
        share_BTA: the weight of each of these experts in the sum.
    """

    x_BTD: Array
    choice_BTA: Array
    share_BTA: Array


class OnDevice(Protocol):
    """Computation of the experts of a device: in groups (`by_groups`), or in tiles (`expert_tiles.by_tiles`)."""

    def __call__(self, pairs: Pairs, weights: ExpertWeights, activate: Activation, first: Array | None) -> Array:
        """Compute the terms of the E experts in `weights`: float32 `[B, T, D]`.

        `first` is the index of the first of these experts; None: the device has all experts.
        """
        ...


def by_token(pairs: Pairs, weights: ExpertWeights, activate: Activation, dtype: Any) -> Array:
    """Multiply each token by the matrices of its experts in a loop, without reading other experts."""
    A = pairs.choice_BTA.shape[-1]
    D = pairs.x_BTD.shape[-1]
    x_X1D = jnp.repeat(pairs.x_BTD.reshape(-1, 1, D), A, axis=0)

    def apply(pair: tuple[Array, Array]) -> Array:
        x_1D, expert = pair
        y_1D: Array = mlp_of(x_1D, expert, weights, activate, dtype)
        return y_1D

    y_X1D = jax.lax.map(apply, (x_X1D, pairs.choice_BTA.reshape(-1)))
    return weighted_sum(y_X1D.astype(jnp.float32), pairs.share_BTA).astype(dtype)


def weighted_sum(y_XD: Array, share_BTA: Array) -> Array:
    """Add the outputs of each token's pairs, times their shares: `[B, T, D]`."""
    y_BTAD = y_XD.reshape(*share_BTA.shape, y_XD.shape[-1])
    return (share_BTA[..., None] * y_BTAD).sum(2)


def mlp_of_rows(x: Array, weights: ExpertWeights, activate: Activation, product: Product) -> Array:
    """Apply the MLP of its expert to each row."""
    up = product(x, weights.up_EDF)
    if weights.gate_EDF is None:
        h = activate(up)
    else:
        h = activate(product(x, weights.gate_EDF)) * up
    return product(h, weights.down_EFD)


def own_experts(choice_BTA: Array, first: Array | None, E: int) -> tuple[Array, Array]:
    """Return the index of each pair's expert among the E experts of this device, and whether it is one of them.

    The experts of this device start at expert `first`; None: at expert 0. For a pair with a different expert, the index is E.
    """
    expert_X = choice_BTA.reshape(-1) - (0 if first is None else first)
    own_X = (expert_X >= 0) & (expert_X < E)
    return jnp.where(own_X, expert_X, E), own_X


def by_groups(pairs: Pairs, weights: ExpertWeights, activate: Activation, first: Array | None) -> Array:
    """Compute the terms of a device's experts, as `OnDevice`, in groups of pairs.

    The pairs are sorted by expert, and each group of pairs is multiplied by the matrix of its expert. Pairs with other experts
    come last, and belong to no group.
    """
    A = pairs.choice_BTA.shape[-1]
    D = pairs.x_BTD.shape[-1]
    E = len(weights.up_EDF)
    expert_X, own_X = own_experts(pairs.choice_BTA, first, E)
    order_X = jnp.argsort(expert_X, stable=True)
    size_E = jnp.bincount(expert_X, length=E).astype(jnp.int32)

    # Rows without a group have undefined products and gradients; the masks replace both with 0.
    x_XD = jnp.where(own_X[order_X][:, None], pairs.x_BTD.reshape(-1, D)[order_X // A], 0)
    y_XD = mlp_of_rows(x_XD, weights, activate, lambda x, w: jax.lax.ragged_dot(x, w, size_E))

    # Restore the order of the tokens, and add the terms of each token.
    back_X = jnp.argsort(order_X)
    y_XD = jnp.where(own_X[:, None], y_XD[back_X].astype(jnp.float32), 0.0)
    return weighted_sum(y_XD, pairs.share_BTA)
