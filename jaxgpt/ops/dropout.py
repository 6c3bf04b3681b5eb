"""Dropout as a function of its key: unrolled, recomputed and scanned blocks draw the same masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability `rate` and divide the others by `1 - rate`; without a key, return x.

    Source: Srivastava et al. 2014.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))
