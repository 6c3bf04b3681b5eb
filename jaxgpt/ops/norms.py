"""Normalization over the last axis, of float32 inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, eps: float) -> jax.Array:
    """Compute `(x - mean) / sqrt(var + eps)`. Source: Ba et al. 2016."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, eps: float) -> jax.Array:
    """Compute `x / sqrt(mean(x^2) + eps)`. Source: Zhang & Sennrich 2019."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def std_norm(x: jax.Array, eps: float) -> jax.Array:
    """Compute `(x - mean) / (std + eps)`, as many NumPy implementations do."""
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    # The gradient of sqrt is infinite at 0, the variance of a row of equal values.
    safe = jnp.where(variance > 0, variance, 1.0)
    return x / (jnp.where(variance > 0, jnp.sqrt(safe), 0.0) + eps)


NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm, "stdnorm": std_norm}
