"""Linear layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.init import initializers, partitioned, weight
from jaxgpt.ops import Ops


class Linear(nn.Module):
    """Compute `x W + b`: `[..., in]` to `[..., out]`.

    Attributes:
        shape: number of inputs and outputs.
        axes: logical names of the two axes, for the sharding table.
        bias: whether to add b.
        residual: whether the result is added to the residual stream; initial weights are then smaller.
    """

    config: ModelConfig
    ops: Ops
    shape: tuple[int, int]
    axes: tuple[str, str]
    bias: bool
    residual: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer."""
        kernel_init, bias_init = initializers(self.config, self.shape[0], self.residual)
        w = weight(self, "kernel", partitioned(kernel_init, self.axes), self.shape)
        b = None
        if self.bias:
            b = self.param("bias", partitioned(bias_init, self.axes[1:]), self.shape[1:], jnp.float32)
        return self.ops.linear(x, w, b, self.ops.dtype)
