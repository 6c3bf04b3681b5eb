"""Normalization with a learned scale and bias."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.model.init import partitioned
from jaxgpt.model.named import Named


class Norm(Named):
    """Normalize in float32; `norm_affine` adds a learned scale and, with `bias` (not RMSNorm), a bias.

    Attributes:
        kind: overrides `config.norm`.
    """

    kind: str = ""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize the last axis."""
        c, kind, shape = self.config, self.kind or self.config.norm, x.shape[-1:]
        if kind == "none":
            return x
        scale, bias, edit = None, None, None if self.ops.edit is None else self.named
        if c.norm_affine:
            scale = self.param("scale", partitioned(nn.initializers.ones, ("norm",)), shape, jnp.float32)
            if c.bias and kind != "rmsnorm":
                bias = self.param("bias", partitioned(nn.initializers.zeros, ("norm",)), shape, jnp.float32)
        return self.named("out", self.ops.norm(kind, x, c.norm_eps, scale, bias, edit).astype(self.ops.dtype))
