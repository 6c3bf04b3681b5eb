"""Normalization, optionally with a learned gain and bias."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxgpt.model.module import Module


class Norm(Module):
    """Normalize in float32; with `norm_affine`, apply a gain and, with `bias`, a bias (not in RMSNorm).

    Attributes:
        kind: name of the norm, as in `config.norm`; `none` returns the input.
    """

    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize the last axis."""
        if self.kind == "none":
            return x
        c = self.config
        shape = x.shape[-1:]
        gain = None
        bias = None
        if c.norm_affine:
            gain = self.weight("scale", nn.initializers.ones, shape, ("norm",))
            if c.bias and self.kind != "rmsnorm":
                bias = self.weight("bias", nn.initializers.zeros, shape, ("norm",))
        edit = None if self.ops.edit is None else self.named
        y = self.ops.norm(self.kind, x, c.norm_eps, gain, bias, edit)
        return self.named("out", y.astype(self.ops.dtype))
