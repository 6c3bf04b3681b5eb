"""Linear layers."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxgpt.model.init import initializers
from jaxgpt.model.module import Module


class Linear(Module):
    """Compute `x W + b`: `[..., in]` to `[..., out]`.

    Attributes:
        shape: number of inputs and outputs.
        axes: logical names of the two axes, for the sharding table.
        bias: whether to add b.
        residual: whether the output is added to the residual stream, which changes the initial weights (`initializers`).
    """

    shape: tuple[int, int]
    axes: tuple[str, str]
    bias: bool
    residual: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to the last axis of x."""
        kernel_init, bias_init = initializers(self.config, self.shape[0], self.residual)
        w = self.weight("kernel", kernel_init, self.shape, self.axes)
        b = self.weight("bias", bias_init, self.shape[1:], self.axes[1:]) if self.bias else None
        return self.ops.linear(x, w, b, self.ops.dtype)
