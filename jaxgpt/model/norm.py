"""Normalization with a learned scale and bias."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.init import partitioned
from jaxgpt.model.named import Named
from jaxgpt.ops.norms import NORMS
from jaxgpt.ops.sums import broadcast_to_tokens


class Norm(Named):
    """Normalize in float32; if `norm_affine`, multiply by a learned scale and, except for RMSNorm, add a learned bias.

    Attributes:
        kind: overrides `config.norm`.
    """

    config: ModelConfig
    dtype: jnp.dtype
    kind: str = ""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = self.kind or self.config.norm
        if kind == "none":
            return x
        y = NORMS[kind](x.astype(jnp.float32), self.config.norm_eps, self.named)
        if self.config.norm_affine:
            ones = partitioned(nn.initializers.ones, ("norm",))
            y = y * broadcast_to_tokens(self.param("scale", ones, (x.shape[-1],), jnp.float32), y.shape)
            if self.config.bias and kind != "rmsnorm":
                zeros = partitioned(nn.initializers.zeros, ("norm",))
                y = y + broadcast_to_tokens(self.param("bias", zeros, (x.shape[-1],), jnp.float32), y.shape)
        return self.named("out", y.astype(self.dtype))
