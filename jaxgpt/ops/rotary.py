"""Rotary position embedding (RoPE): rotate queries and keys by angles proportional to positions."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine of the angles, each [B, T, R / 2], of R rotated channels


class Llama3Scaling(NamedTuple):
    """Llama 3 RoPE scaling: stretch long wavelengths, for contexts longer than the trained context.

    Attributes:
        factor: multiplier of long wavelengths; 1 disables scaling.
        low: wavelengths above `original_context / low` are multiplied by `factor`.
        high: wavelengths below `original_context / high` are unchanged.
        original_context: the context length before scaling, in tokens.

    Source: `apply_scaling` in models/llama3/model.py of https://github.com/meta-llama/llama-models.
    """

    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


def rope_frequencies(width: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """Compute the frequencies of RoPE, `f_i = theta^(-2i/R)`, with R = `width` rotated channels.

    With scaling: `k * f + (1 - k) * f / factor`, where `k = clip((C / w - low) / (high - low), 0, 1)`, w is the wavelength
    `2 pi / f` and C the original context.

    Returns:
        `[R / 2]` in radians per position, float64.

    Source: Su et al. 2021.
    """
    frequency = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if scaling.factor == 1.0:
        return frequency
    turns = scaling.original_context * frequency / (2 * np.pi)  # C / w
    keep = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rope_rotation(positions_BT: jax.Array, frequency_h: np.ndarray) -> Rotation:
    """Compute the cosine and sine of the angles at each position, float32 `[B, T, R / 2]` each."""
    frequency = jnp.asarray(frequency_h, jnp.float32)
    position_BT1 = positions_BT.astype(jnp.float32)[..., None]
    angle_BTh = position_BT1 * frequency[None, None, :]
    return jnp.cos(angle_BTh), jnp.sin(angle_BTh)


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate pairs `(x[i], x[i + R/2])`, so that `q . k` depends only on the relative position.

    `y1 = x1 cos a - x2 sin a`, `y2 = x2 cos a + x1 sin a`, where x1 and x2 are the halves of the first R channels of a head
    ("rotate half"), and a is the vector of the R/2 angles. The other channels are unchanged.
    """
    chex.assert_rank([x_BTNH, *rotation], [4, 3, 3])
    cos, sin = (each[:, :, None, :] for each in rotation)
    half = cos.shape[-1]
    x1, x2, rest = jnp.split(x_BTNH.astype(jnp.float32), [half, 2 * half], axis=-1)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return jnp.concatenate([y1, y2, rest], axis=-1).astype(x_BTNH.dtype)
