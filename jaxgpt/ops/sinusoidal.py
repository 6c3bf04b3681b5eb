"""Sinusoidal position encoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def sinusoidal(positions_BT: jax.Array, width: int) -> jax.Array:
    """Compute sinusoidal position encodings, with sine and cosine interleaved.

    `out[2i] = sin(p / 10000^(2i/D))`, `out[2i+1] = cos(p / 10000^(2i/D))`

    Args:
        positions_BT: token positions p, from 0.
        width: D, even.

    Returns:
        `[B, T, D]` in float32.

    Source: Vaswani et al. 2017, section 3.5.
    """
    frequency = 10_000.0 ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    position_BT1 = positions_BT.astype(jnp.float32)[..., None]
    angle_BTh = position_BT1 * jnp.asarray(frequency, jnp.float32)[None, None, :]
    interleaved = jnp.stack([jnp.sin(angle_BTh), jnp.cos(angle_BTh)], axis=-1)
    return interleaved.reshape(*positions_BT.shape, width)
