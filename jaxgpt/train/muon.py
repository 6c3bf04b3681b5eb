"""Muon: orthogonalized momentum. Matrices of one shape are stacked, and the stack is split over all devices.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
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

from jaxgpt.model.scan import STACKED
from jaxgpt.ops.sharding import constrain


class Matrix(NamedTuple):
    """Which axes of a kernel are the rows and columns of a matrix.

    Attributes:
        inputs: its input axes; heads and head width form one dimension.
        outputs: its output axes.
        names: the logical axes of inputs and outputs; one of them is the residual stream's width.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, str]


MATRICES = {
    "q_proj": Matrix((0,), (1, 2), ("embed", "heads")),
    "k_proj": Matrix((0,), (1, 2), ("embed", "kv_heads")),
    "v_proj": Matrix((0,), (1, 2), ("embed", "kv_heads")),
    "o_proj": Matrix((0, 1), (2,), ("heads", "embed")),
    "up_proj": Matrix((0,), (1,), ("embed", "mlp")),
    "gate_proj": Matrix((0,), (1,), ("embed", "mlp")),
    "down_proj": Matrix((0,), (1,), ("mlp", "embed")),
}
# From the sharding of the weights to one device per matrix, one collective at a time: XLA finds no better way by itself.
WAY = ("matrix_shards", None, None), ("matrices", None, None)
EPS = 1e-8  # added to the norm by which matrices are divided
QUINTIC = (3.4445, -4.7750, 2.0315)  # a polynomial that is steep at zero and then stays within 0.7 and 1.2


def muon(
    learning_rate: optax.Schedule, steps: int, momentum: float, weight_decay: float, momentum_dtype: Any
) -> optax.GradientTransformation:
    """Make the transformation `w <- w - rate (sqrt(max(1, out / in)) orthogonal(m) + decay w)`, m: Nesterov momentum.

    Args:
        learning_rate: the schedule.
        steps: number of Newton-Schulz iterations.
        momentum: decay of the momentum.
        weight_decay: decoupled weight decay, multiplied by the rate.
        momentum_dtype: dtype of the stored momentum.
    """
    return optax.chain(
        nesterov(momentum, momentum_dtype),
        optax.stateless(lambda updates, _: orthogonal(updates, steps)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def nesterov(decay: float, dtype: Any) -> optax.GradientTransformation:
    """Compute the Nesterov momentum of `optax.contrib.scale_by_muon`, without its orthogonalization.

    `m <- decay m + (1 - decay) g`; the update is `decay m / (1 - decay^(t + 1)) + (1 - decay) g / (1 - decay^t)` at step t.
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
        return state._replace(ns_coeffs=state.ns_coeffs.astype(jnp.float32))  # not float64 under x64

    return optax.GradientTransformation(init, update)


def orthogonal(updates: Any, steps: int) -> Any:
    """Bring the singular values of matrices near 1, and multiply by `sqrt(max(1, out / in))`.

    Each is divided by its Frobenius norm; then `X <- a X + (b A + c A^2) X` with `A = X X^T`, on the shorter side. Matrices of
    one shape are stacked, and each device computes some of them, whatever the mesh: computing all of them on each device
    would take a large part of a step.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    stacks = [_stack(path, leaf) for path, leaf in leaves]
    for place, x_NEO in enumerate(stacks):
        alike[x_NEO.shape[1:]].append(place)
    results: list[Any] = [None] * len(leaves)
    for places in alike.values():
        way = (None, "embed", _other_axis(leaves[places[0]][0])), (None, "embed", None), *WAY
        x_NEO = _moved(jnp.concatenate([stacks[place] for place in places]), way)
        x_NEO /= jnp.linalg.norm(x_NEO, axis=(1, 2), keepdims=True) + EPS
        for _ in range(steps):
            x_NEO = _newton_schulz(x_NEO)
        x_NEO = _moved(x_NEO, way[::-1])
        ends = np.cumsum([len(stacks[place]) for place in places])[:-1]
        for place, part_NEO in zip(places, jnp.split(x_NEO, ends), strict=True):
            results[place] = _unstack(*leaves[place], part_NEO)
    return jax.tree.unflatten(tree, results)


def _moved(x_NEO: jax.Array, way: Sequence[tuple[str | None, ...]]) -> jax.Array:
    for names in way:
        x_NEO = constrain(x_NEO, names)
    return x_NEO


def _newton_schulz(x_NEO: jax.Array) -> jax.Array:
    a, b, c = QUINTIC
    if x_NEO.shape[1] <= x_NEO.shape[2]:
        gram_NEE = x_NEO @ x_NEO.mT
        return a * x_NEO + (b * gram_NEE + c * (gram_NEE @ gram_NEE)) @ x_NEO
    gram_NOO = x_NEO.mT @ x_NEO
    return a * x_NEO + x_NEO @ (b * gram_NOO + c * (gram_NOO @ gram_NOO))


def _stack(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    """Reshape a kernel, or the kernels of all layers, to matrices `[N, E, O]`: residual width, and the other side."""
    x_NIO = leaf.reshape(-1, *_sides(path, leaf))
    return x_NIO if _matrix(path).names[0] == "embed" else x_NIO.mT


def _unstack(path: tuple[Any, ...], leaf: jax.Array, x_NEO: jax.Array) -> jax.Array:
    """Invert `_stack`, and scale."""
    inputs, outputs = _sides(path, leaf)
    x_NIO = x_NEO if _matrix(path).names[0] == "embed" else x_NEO.mT
    return math.sqrt(max(1.0, outputs / inputs)) * x_NIO.reshape(leaf.shape)


def _sides(path: tuple[Any, ...], leaf: jax.Array) -> tuple[int, int]:
    own = leaf.shape[_layers(path) :]
    inputs, outputs, _ = _matrix(path)
    return math.prod(own[axis] for axis in inputs), math.prod(own[axis] for axis in outputs)


def _matrix(path: tuple[Any, ...]) -> Matrix:
    return MATRICES[names_of(path)[-2]]


def _other_axis(path: tuple[Any, ...]) -> str:
    return next(name for name in _matrix(path).names if name != "embed")


def _layers(path: tuple[Any, ...]) -> int:
    """Return 1 if the first axis of a kernel is the layers, else 0."""
    return int(names_of(path)[0] == STACKED)


def names_of(path: tuple[Any, ...]) -> list[str]:
    """Return the names on the path to a leaf, without those of linen's boxes around leaves."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
