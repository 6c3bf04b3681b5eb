"""Normalization, optionally with a learned gain and bias."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxgpt.model.module import Module


class Norm(Module):
    """Normalize in float32; with `norm_affine`, apply a gain and, with `bias`, a bias (not in RMSNorm).

    Attributes:
        kind: name of the norm; "": `config.norm`. The norm `none` returns its input.
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
            scale = self.weight("scale", nn.initializers.ones, shape, ("norm",))
            if c.bias and kind != "rmsnorm":
                bias = self.weight("bias", nn.initializers.zeros, shape, ("norm",))
        return self.named("out", self.ops.norm(kind, x, c.norm_eps, scale, bias, edit).astype(self.ops.dtype))
