"""Rotary position embedding (RoPE): rotate queries and keys by angles proportional to positions."""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine of the angles, each [B, T, R / 2], with R rotated channels


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

    def kept(self, frequency_h: np.ndarray, theta: float) -> np.ndarray:
        """Compute the fraction of each frequency to keep: linear in the number of turns within the original context."""
        turns_h = self.original_context * frequency_h / (2 * np.pi)
        return np.clip((turns_h - self.low) / (self.high - self.low), 0.0, 1.0)

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0


class YarnScaling(NamedTuple):
    """YaRN: stretch the wavelengths with few turns within the original context, and sharpen the attention.

    Attributes:
        factor: multiplier of long wavelengths; 1 disables scaling.
        slow: number of turns within the original context; wavelengths with fewer turns are multiplied by `factor` (beta_slow;
            alpha in the paper).
        fast: number of turns; wavelengths with more turns are unchanged (beta_fast; beta in the paper).
        original_context: the context length before scaling, in tokens.
        attention: factor of cosine and sine, so that scores are multiplied by its square; 0: `1 + 0.1 ln(factor)`.

    Source: Peng et al. 2023, sections 3.2 and 3.4. Between the bounds, the ramp is linear in the index of the channel, and the
    bounds are rounded outwards, as in the authors' code.
    """

    factor: float
    slow: float = 1.0
    fast: float = 32.0
    original_context: int = 8192
    attention: float = 0.0

    def kept(self, frequency_h: np.ndarray, theta: float) -> np.ndarray:
        """Compute the fraction of each frequency to keep: linear in the index of the channel between the bounds."""
        h = len(frequency_h)
        first = max(math.floor(self._channel(self.fast, h, theta)), 0)
        last: float = min(math.ceil(self._channel(self.slow, h, theta)), 2 * h - 1)
        if first == last:
            last += 0.001  # avoids a division by 0: the ramp becomes a step
        return 1.0 - np.clip((np.arange(h) - first) / (last - first), 0.0, 1.0)

    def _channel(self, turns: float, h: int, theta: float) -> float:
        """Return the fractional index of the channel with this number of turns within the original context."""
        return h * math.log(self.original_context / (2 * math.pi * turns)) / math.log(theta)

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        return self.attention or 1.0 + 0.1 * math.log(max(self.factor, 1.0))


def rope_frequencies(width: int, theta: float, scaling: Llama3Scaling | YarnScaling) -> np.ndarray:
    """Compute the frequencies of RoPE, `f_i = theta^(-2i/R)`, with R = `width` rotated channels.

    With scaling, they are `k * f + (1 - k) * f / factor`, where k is `scaling.kept(f)`. For Llama 3, `k = clip((C / w - low) /
    (high - low), 0, 1)`, where w is the wavelength `2 pi / f` and C the original context.

    Returns:
        `[R / 2]` in radians per position, float64.

    Source: Su et al. 2021.
    """
    frequency_h = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if scaling.factor == 1.0:
        return frequency_h
    keep_h = scaling.kept(frequency_h, theta)
    return keep_h * frequency_h + (1 - keep_h) * frequency_h / scaling.factor


def rope_rotation(positions_BT: jax.Array, frequency_h: np.ndarray) -> Rotation:
    """Compute the cosine and sine of `position * frequency`, float32 `[B, T, R / 2]` each."""
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
    cos, sin = (x_BTh[:, :, None, :] for x_BTh in rotation)
    half = cos.shape[-1]
    x1, x2, rest = jnp.split(x_BTNH.astype(jnp.float32), [half, 2 * half], axis=-1)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return jnp.concatenate([y1, y2, rest], axis=-1).astype(x_BTNH.dtype)
