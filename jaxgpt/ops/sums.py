"""Reductions by halves. XLA's CPU backend vectorizes these, but not its own reductions of many numbers to one."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

SHORT = 64  # numbers left to a reduction: 32 or fewer would be computed again wherever their sum is used
HALVINGS = 5  # at most: 32 parts are read at the same time, at the speed of memory


def halve(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Combine the halves of the last axis up to five times, while it is even and longer than 64."""
    for _ in range(HALVINGS):
        half, odd = divmod(x.shape[-1], 2)
        if x.shape[-1] <= SHORT or odd:
            break
        x = combine(x[..., :half], x[..., half:])
    return x


@jax.jit  # traced once for each shape
def sum_of_squares(x: jax.Array) -> jax.Array:
    """Compute the sum of the squares of an array, by halves."""
    return halve(jnp.add, jnp.square(x).reshape(-1)).sum()
