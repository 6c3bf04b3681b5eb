"""Normalization over the last axis, of float32 inputs. `named` receives each row's factor, "scale" (std_norm: the divisor)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import Name


def layer_norm(x: jax.Array, eps: float, named: Name = lambda name, x: x) -> jax.Array:
    """Compute `(x - mean) / sqrt(var + eps)`. Source: Ba et al. 2016."""
    x = x - x.mean(-1, keepdims=True)
    return x * named("scale", jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps))


def rms_norm(x: jax.Array, eps: float, named: Name = lambda name, x: x) -> jax.Array:
    """Compute `x / sqrt(mean(x^2) + eps)`. Source: Zhang & Sennrich 2019."""
    return x * named("scale", jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps))


def std_norm(x: jax.Array, eps: float, named: Name = lambda name, x: x) -> jax.Array:
    """Compute `(x - mean) / (std + eps)`, as many NumPy implementations do."""
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    # The gradient of sqrt is infinite at 0, the variance of a row of equal values.
    safe = jnp.where(variance > 0, variance, 1.0)
    return x / named("scale", jnp.where(variance > 0, jnp.sqrt(safe), 0.0) + eps)


NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm, "stdnorm": std_norm}
