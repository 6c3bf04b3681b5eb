"""Muon: orthogonalized momentum.

Matrices of the same shape, up to transposition, are stacked and sharded over all devices. Source: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/.

Letters in names: M matrices of a stack, E width of the residual stream, O the other axis. Before a matrix is transposed to this
order, its axes are I inputs and O outputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonState, scale_by_muon

from jaxgpt.model.params import Model, weight_at
from jaxgpt.ops.sharding import constrain

# These logical axes reshard a stack of matrices to one device per matrix, one collective at a time; the compiler does not
# find this schedule.
TO_DEVICES = ("matrix_shards", None, None), ("matrices", None, None)
EPS = 1e-8  # added to the norm of a matrix before the division
QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c of a x + b x^3 + c x^5: steep at 0, and 0.68 to 1.2 for x in [0.22, 1.2]


def muon(
    learning_rate: optax.Schedule,
    steps: int,
    momentum: float,
    weight_decay: jax.typing.ArrayLike,
    momentum_dtype: Any,
    model: Model,
) -> optax.GradientTransformation:
    """Make Muon: `w <- w - rate * (orthogonal(m) + decay * w)`, with m the Nesterov momentum (`nesterov`).

    Args:
        learning_rate: learning-rate schedule.
        steps: number of Newton-Schulz iterations.
        momentum: decay of the momentum.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        momentum_dtype: dtype of the stored momentum.
        model: architecture, for the axes of the matrices.
    """
    return optax.chain(
        nesterov(momentum, momentum_dtype),
        optax.stateless(lambda updates, _: orthogonal(updates, steps, model)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def nesterov(decay: float, dtype: Any) -> optax.GradientTransformation:
    """Compute the Nesterov momentum of `optax.contrib.scale_by_muon`, without its orthogonalization.

    `m <- decay * m + (1 - decay) * g`; the output of step t >= 1 is
    `decay * m / (1 - decay^(t + 1)) + (1 - decay) * g / (1 - decay^t)`.
    """

    def update(grads: Any, state: MuonState, _: Any = None) -> tuple[Any, MuonState]:
        count = optax.safe_increment(state.count)
        momentum = optax.tree.update_moment(grads, state.mu, decay, 1)
        ahead = decay / (1 - decay ** optax.safe_increment(count))
        now = (1 - decay) / (1 - decay**count)
        updates = jax.tree.map(lambda m, g: ahead * m + now * g, momentum, grads)
        return updates, MuonState(count, optax.tree.cast(momentum, dtype), state.ns_coeffs)

    def init(params: Any) -> MuonState:
        state = scale_by_muon(ns_coeffs=QUINTIC, mu_dtype=dtype).init(params)
        return state._replace(ns_coeffs=state.ns_coeffs.astype(jnp.float32))  # unused, but float64 under x64

    return optax.GradientTransformation(init, update)


def orthogonal(updates: Any, steps: int, model: Model) -> Any:
    """Orthogonalize matrices approximately, and scale them by `sqrt(max(1, out / in))`.

    Each matrix is divided by its Frobenius norm. Each of `steps` iterations computes `X <- a X + (b A + c A^2) X` with
    `A = X X^T`, or `X <- a X + X (b A + c A^2)` with `A = X^T X` if this A is smaller. Matrices of the same shape, up to
    transposition, are stacked and sharded over the devices. Orthogonalizing all matrices on each device would take a large
    part of a step.
    """
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
    leaves = [_read(path, leaf, model) for path, leaf in paths_and_leaves]
    same_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        same_shape[leaf.x_MEO.shape[1:]].append(index)

    results: list[Any] = [None] * len(leaves)
    for indices in same_shape.values():
        stacked = [leaves[index] for index in indices]
        x_MEO = jnp.concatenate([leaf.x_MEO for leaf in stacked])
        x_MEO = _orthogonal_stack(x_MEO, stacked[0].axes, steps)

        # Split the stack into its leaves.
        ends = np.cumsum([len(leaf.x_MEO) for leaf in stacked])
        parts = jnp.split(x_MEO, ends[:-1])
        for index, part_MEO in zip(indices, parts, strict=True):
            results[index] = _scaled(part_MEO, leaves[index])
    return jax.tree.unflatten(tree, results)


class _Leaf(NamedTuple):
    """The matrices of a leaf.

    Attributes:
        x_MEO: the matrices of all layers and stack axes of the leaf; the first axis of a matrix is the residual stream's width.
        axes: logical axes of a matrix, in the order of the leaf.
        shape: shape of the leaf.
    """

    x_MEO: jax.Array
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]


def _read(path: tuple[Any, ...], leaf: jax.Array, model: Model) -> _Leaf:
    """Return the matrices of a leaf."""
    weight = weight_at(path, model)
    assert weight is not None, path
    axes = weight.axes[-2:]
    x_MIO = leaf.reshape(-1, *leaf.shape[-2:])
    return _Leaf(_by_width(x_MIO, axes), axes, leaf.shape)


def _orthogonal_stack(x_MEO: jax.Array, axes: tuple[str | None, ...], steps: int) -> jax.Array:
    """Orthogonalize a stack of matrices, sharded over the devices; `axes` are the logical axes of one matrix."""
    # All of these matrices are sharded alike: heads and MLP widths use the same mesh axis.
    other = next(name for name in axes if name != "embed")
    schedule = (None, "embed", other), (None, "embed", None), *TO_DEVICES
    x_MEO = _reshard(x_MEO, schedule)
    x_MEO /= jnp.linalg.norm(x_MEO, axis=(1, 2), keepdims=True) + EPS
    for _ in range(steps):
        x_MEO = _newton_schulz(x_MEO)
    return _reshard(x_MEO, schedule[::-1])


def _scaled(x_MEO: jax.Array, leaf: _Leaf) -> jax.Array:
    """Scale orthogonal matrices, and return them in the shape of their leaf."""
    inputs, outputs = leaf.shape[-2:]
    scale = math.sqrt(max(1.0, outputs / inputs))
    return scale * _by_width(x_MEO, leaf.axes).reshape(leaf.shape)


def _by_width(x_MIO: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Transpose matrices, if needed, so that the residual stream's width comes first; an involution."""
    return x_MIO if axes[0] == "embed" else x_MIO.mT


def _reshard(x_MEO: jax.Array, schedule: Sequence[tuple[str | None, ...]]) -> jax.Array:
    """Reshard a stack in steps, each given by the logical axes of the stack."""
    for names in schedule:
        x_MEO = constrain(x_MEO, names)
    return x_MEO


def _newton_schulz(x_MEO: jax.Array) -> jax.Array:
    """Take one Newton-Schulz iteration; see `orthogonal`."""
    a, b, c = QUINTIC
    if x_MEO.shape[1] <= x_MEO.shape[2]:
        gram_MEE = x_MEO @ x_MEO.mT
        return a * x_MEO + (b * gram_MEE + c * (gram_MEE @ gram_MEE)) @ x_MEO
    gram_MOO = x_MEO.mT @ x_MEO
    return a * x_MEO + x_MEO @ (b * gram_MOO + c * (gram_MOO @ gram_MOO))
