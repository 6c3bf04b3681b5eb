"""Updates that are left out: not finite, or a spike. Pure functions; what they remember is part of the train state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

HORIZON = 50  # updates over which the running means reach back; before so many, nothing counts as a spike


class Guard(NamedTuple):
    """What is remembered of the updates before.

    Attributes:
        in_a_row: int32, updates left out since the last one that was made.
        total: int32, updates left out.
        seen: int32, finite updates, made or not.
        loss: running mean, nats a token.
        grad_norm: running mean.
    """

    in_a_row: jax.Array
    total: jax.Array
    seen: jax.Array
    loss: jax.Array
    grad_norm: jax.Array


def init_guard() -> Guard:
    """Before the first update."""
    # Each an array of its own: the train step gives up all that it is given, and nothing can be given up twice.
    return Guard(*(jnp.zeros((), jnp.int32) for _ in range(3)), *(jnp.zeros((), jnp.float32) for _ in range(2)))


def judge(guard: Guard, loss: jax.Array, grad_norm: jax.Array, spike_factor: float) -> tuple[jax.Array, Guard]:
    """Whether an update is made, and what is remembered then.

    It is where loss and norm are finite and at most `spike_factor` times their running means `m`. These follow
    `m <- m + (min(x, spike_factor m) - m) max(1 / n, 1 / HORIZON)`: a spike moves them little, and a level that stays is
    accepted in the end.

    Args:
        guard: before.
        loss: of the batch.
        grad_norm: of its gradient.
        spike_factor: 0: only what is not finite is left out.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    values, means = jnp.stack([loss, grad_norm]), jnp.stack([guard.loss, guard.grad_norm])
    made, entering = finite, values
    if spike_factor:
        settled = guard.seen >= HORIZON
        highest = jnp.where(settled, spike_factor * means, jnp.inf)
        made = finite & (values <= highest).all()
        entering = jnp.minimum(values, highest)
    seen = guard.seen + finite
    weight = 1 / jnp.clip(seen, 1, HORIZON).astype(means.dtype)  # integers would divide to float64 under x64
    means = jnp.where(finite, means + (entering - means) * weight, means)
    in_a_row = jnp.where(made, 0, guard.in_a_row + 1)
    return made, Guard(in_a_row, guard.total + ~made, seen, means[0], means[1])


def squares(grads: Any) -> jax.Array:
    """Summed squares of every gradient, `[leaves]`: parts of the global norm, which is computed anyway."""
    # With 64-bit types enabled, optax returns float64.
    return jnp.stack([optax.tree.norm(leaf, squared=True).astype(jnp.float32) for leaf in jax.tree.leaves(grads)])


def first_bad(params: Any, squares_n: Sequence[float] | np.ndarray) -> str:
    """The gradient that was the first not to be finite on the way back, by its path, and how many others there are.

    Args:
        params: a tree of the weights' structure.
        squares_n: what `squares` gave.

    Returns:
        A few words, or "" where all are finite.
    """
    names = ["/".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    bad = [index for index, value in enumerate(squares_n) if not np.isfinite(value)]
    if not bad:
        return ""
    first = max(bad, key=lambda index: (_depth(names[index]), index))
    return f"first in the gradient of {names[first]} ({len(bad)} of {len(names)} gradients)"


def _depth(name: str) -> float:
    """How far from the input. Within a block the order of names is that of the computation."""
    module = name.split("/")[0]
    if module.startswith("h_"):
        return 1.0 + int(module[2:])
    return 0.0 if module in ("wte", "wpe") else float("inf")
