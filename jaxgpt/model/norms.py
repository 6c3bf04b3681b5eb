"""Norms over the last axis, in float32 whatever comes in."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.linear import partitioned


def layer_norm(x: jax.Array, eps: float) -> jax.Array:
    """`(x - mean) / sqrt(var + eps)`. Source: Ba et al. 2016."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps)`. Source: Zhang & Sennrich 2019."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def std_norm(x: jax.Array, eps: float) -> jax.Array:
    """`(x - mean) / (std + eps)`: the form of many a first decoder in NumPy."""
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    # The root has no finite slope at zero, where a row of equal values stands.
    safe = jnp.where(variance > 0, variance, 1.0)
    return x / (jnp.where(variance > 0, jnp.sqrt(safe), 0.0) + eps)


NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm, "stdnorm": std_norm}


class Norm(nn.Module):
    """The config's norm with, where it is affine, a learned gain and (LayerNorm with biases) a learned offset."""

    config: ModelConfig
    dtype: jnp.dtype
    kind: str = ""  # overrides config.norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = self.kind or self.config.norm
        if kind == "none":
            return x
        y = NORMS[kind](x.astype(jnp.float32), self.config.norm_eps)
        lead = range(x.ndim - 1)
        if self.config.norm_affine:
            ones = partitioned(nn.initializers.ones, ("norm",))
            y = y * jnp.expand_dims(self.param("scale", ones, (x.shape[-1],)), lead)
            if self.config.bias and kind != "rmsnorm":
                zeros = partitioned(nn.initializers.zeros, ("norm",))
                y = y + jnp.expand_dims(self.param("bias", zeros, (x.shape[-1],)), lead)
        return y.astype(self.dtype)
