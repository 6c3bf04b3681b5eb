"""Linear layers."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.init import initializers, partitioned, weight
from jaxgpt.ops.matmul import matmul
from jaxgpt.ops.sums import broadcast_to_tokens


class Linear(nn.Module):
    """Compute `y = x W + b`, contracting the last `n_in` axes of x.

    Attributes:
        shape: shape of W, input axes first.
        axes: logical name of each axis of W, for the sharding table.
        bias: whether to add b, of the output's shape.
        dtype: compute dtype.
        residual: whether y is added to the residual stream; its initial weights are then smaller.
        n_in: number of input axes of W.
    """

    config: ModelConfig
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    bias: bool
    dtype: jnp.dtype
    residual: bool = False
    n_in: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel_init, bias_init = initializers(self.config, math.prod(self.shape[: self.n_in]), self.residual)
        kernel = weight(self, "kernel", partitioned(kernel_init, self.axes), self.shape)
        y = matmul(x, kernel, self.n_in, self.dtype)
        if self.bias:
            axes, shape = self.axes[self.n_in :], self.shape[self.n_in :]
            bias: jax.Array = self.param("bias", partitioned(bias_init, axes), shape, jnp.float32)
            y = y + broadcast_to_tokens(bias.astype(self.dtype), y.shape)
        return y
