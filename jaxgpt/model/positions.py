"""Where a token stands: sinusoids added to the input, or rotations of queries and keys. No parameters live here."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.cpu import not_inlined

Rotation = tuple[jax.Array, jax.Array]


def sinusoidal(positions_BT: jax.Array, width: int) -> jax.Array:
    """Sinusoids of geometrically growing wavelength, sine and cosine interleaved.

    `out[2i] = sin(p / 10000^(2i/D))`, `out[2i+1] = cos(p / 10000^(2i/D))`

    Args:
        positions_BT: token positions, from 0.
        width: D, even.

    Returns:
        `[B, T, D]` in float32.

    Source: Vaswani et al. 2017, section 3.5.
    """
    frequency = 10_000.0 ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    angle = positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)[None, None, :]
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions_BT.shape, width)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle in radians by which each pair of coordinates turns from one position to the next.

    `f_i = theta^(-2i/H)`. With `rope_factor` s above 1, llama3's scaling follows: with wavelength `w = 2 pi / f` and
    original context C, `f / s` where `w > C / low`, `f` where `w < C / high`, and in between a blend with the weight
    `(C / w - low) / (high - low)` for `f`.

    Returns:
        `[H / 2]` in float64.

    Source: Su et al. 2021 (RoPE); Llama Team 2024, section 3.2 (long context).
    """
    width = config.head_width
    frequency = config.rope_theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if config.rope_factor == 1.0:
        return frequency
    turns = config.rope_original_context * frequency / (2 * np.pi)  # of one pair within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / config.rope_factor


def rope_rotation(positions_BT: jax.Array, config: ModelConfig) -> Rotation:
    """Cosine and sine of each position's angles, for `rotate`: two of `[B, T, H / 2]` in float32."""
    frequency = jnp.asarray(rope_frequencies(config), jnp.float32)
    angle_BTh = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]
    rotation: Rotation = jax.lax.platform_dependent(
        angle_BTh, cpu=functools.partial(not_inlined, _cos_sin), default=_cos_sin
    )
    return rotation


def _cos_sin(angle_BTh: jax.Array) -> Rotation:
    return jnp.cos(angle_BTh), jnp.sin(angle_BTh)


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Turn each pair `(x[i], x[i + H/2])` by its angle: scores of rotated q and k depend on distance alone.

    `y1 = x1 cos a - x2 sin a`, `y2 = x2 cos a + x1 sin a`, with x1, x2 the halves of the head ("rotate half").
    """
    chex.assert_rank([x_BTNH, *rotation], [4, 3, 3])
    cos, sin = (each[:, :, None, :] for each in rotation)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)
