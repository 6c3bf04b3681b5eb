"""Rotary position embedding (RoPE): queries and keys are rotated by an angle proportional to their position."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.ops.cpu import call_without_inlining

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine of every angle, each [B, T, H / 2]


class Llama3Scaling(NamedTuple):
    """Stretch of RoPE's long wavelengths for a context longer than the one trained on.

    Attributes:
        factor: how much long wavelengths are stretched; 1: not at all.
        low: wavelengths over `original_context / low` are stretched in full.
        high: wavelengths under `original_context / high` are kept.
        original_context: the context length before scaling, in tokens.

    Source: Llama Team 2024, section 3.2 (long context).
    """

    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


def rope_frequencies(head_width: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """Compute the angle in radians by which each pair of coordinates turns from one position to the next.

    `f_i = theta^(-2i/H)`. With a scaling factor s other than 1, wavelength `w = 2 pi / f` and original context C, the
    frequency becomes `f / s` where `w > C / low`, stays `f` where `w < C / high`, and is blended in between with weight
    `(C / w - low) / (high - low)` for `f`.

    Returns:
        `[H / 2]` in float64.

    Source: Su et al. 2021.
    """
    frequency = theta ** (-np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if scaling.factor == 1.0:
        return frequency
    turns = scaling.original_context * frequency / (2 * np.pi)  # of one pair within the original context
    keep = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rope_rotation(positions_BT: jax.Array, frequency_h: np.ndarray) -> Rotation:
    """Compute the cosine and sine of each position's angles, for `rotate`: two arrays `[B, T, H / 2]` in float32."""
    frequency = jnp.asarray(frequency_h, jnp.float32)
    angle_BTh = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]
    # Left alone, XLA's CPU backend fuses these into every head that uses them and computes them once for each.
    rotation: Rotation = jax.lax.platform_dependent(
        angle_BTh, cpu=functools.partial(call_without_inlining, _cos_sin), default=_cos_sin
    )
    return rotation


def _cos_sin(angle_BTh: jax.Array) -> Rotation:
    return jnp.cos(angle_BTh), jnp.sin(angle_BTh)


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate each pair `(x[i], x[i + H/2])` by its angle: scores of rotated q and k depend on distance alone.

    `y1 = x1 cos a - x2 sin a`, `y2 = x2 cos a + x1 sin a`, with x1, x2 the halves of the head ("rotate half").
    """
    chex.assert_rank([x_BTNH, *rotation], [4, 3, 3])
    cos, sin = (each[:, :, None, :] for each in rotation)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)
