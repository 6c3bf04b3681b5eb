"""Dropout as a function of a random key: unrolled, remat and scanned blocks draw the same masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero elements with probability `rate`, and divide the others by `1 - rate`; without a key, return x.

    Source: Srivastava et al. 2014.
    """
    if key is None or rate == 0:
        return x
    # An explicit float32 gives the same masks when JAX_ENABLE_X64 is set.
    keep = jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))
