"""Normalization over the last axis, in float32.

`edit` receives the normalizing factor of each vector, `[..., 1]`, as "scale".
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import Edit
from jaxgpt.ops.registry import Registry


def unedited(name: str, x: jax.Array) -> jax.Array:
    """Return the activation unchanged."""
    return x


def layer_norm(x: jax.Array, eps: float, edit: Edit = unedited) -> jax.Array:
    """Compute `(x - mean) / sqrt(var + eps)`. Source: Ba et al. 2016."""
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    return x * edit("scale", jax.lax.rsqrt(variance + eps))


def rms_norm(x: jax.Array, eps: float, edit: Edit = unedited) -> jax.Array:
    """Compute `x / sqrt(mean(x^2) + eps)`. Source: Zhang & Sennrich 2019."""
    mean_square = jnp.square(x).mean(-1, keepdims=True)
    return x * edit("scale", jax.lax.rsqrt(mean_square + eps))


def std_norm(x: jax.Array, eps: float, edit: Edit = unedited) -> jax.Array:
    """Compute `(x - mean) / (std + eps)`, with `std = sqrt(mean((x - mean)^2))`."""
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    # The variance of equal values is 0, where the gradient of sqrt is infinite, so sqrt receives 1 instead.
    safe = jnp.where(variance > 0, variance, 1.0)
    std = jnp.where(variance > 0, jnp.sqrt(safe), 0.0)
    return x * edit("scale", 1 / (std + eps))


NORMS: Registry[Callable[..., jax.Array]] = Registry(layernorm=layer_norm, rmsnorm=rms_norm, stdnorm=std_norm)


def norm(
    kind: str,
    x: jax.Array,
    eps: float,
    gain: jax.Array | None = None,
    bias: jax.Array | None = None,
    edit: Edit | None = None,
) -> jax.Array:
    """Normalize in float32 with the named norm, then apply `gain` and `bias`, if given: `[..., D]`."""
    y = NORMS[kind](x.astype(jnp.float32), eps, edit or unedited)
    if gain is not None:
        y = y * jnp.broadcast_to(gain, y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias, y.shape)
    return y
