"""Dropout as a function of its key: whoever runs the blocks, one by one, recomputed or scanned, draws the same masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Each number zero with probability `rate`, and divided by `1 - rate` otherwise; without a key, x itself.

    Source: Srivastava et al. 2014.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def part_of(key: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """The key of one of several places that draw from it."""
    return None if key is None else jax.random.fold_in(key, index)
