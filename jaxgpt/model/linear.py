"""Affine maps and tables: the two things that hold nearly all parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.cpu import transposed_copy
from jaxgpt.model.weights import Transposed, transposed_matmul


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, kernel: jax.Array, n_in: int = 1) -> jax.Array:
    """Contract the last `n_in` axes of `x` with the first `n_in` of `kernel`.

    The gradients are the textbook's, `dx = dy W^T` and `dW = x^T dy`, and are written out because XLA on a CPU, left to
    transpose the product by itself, computes the whole residual chain of every layer again for x^T.
    """
    return jnp.tensordot(x, kernel, n_in)


def _matmul_forward(x: jax.Array, kernel: jax.Array, n_in: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.tensordot(x, kernel, n_in), (x, kernel)


def _matmul_backward(n_in: int, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    n_out = kernel.ndim - n_in
    batch = list(range(x.ndim - n_in))
    outputs = (tuple(range(dy.ndim - n_out, dy.ndim)), tuple(range(n_in, kernel.ndim)))
    dx = jnp.tensordot(dy, kernel, outputs)

    def on_cpu(x: jax.Array, dy: jax.Array) -> jax.Array:
        tokens = math.prod(x.shape[: len(batch)])
        return (transposed_copy(x.reshape(tokens, -1)) @ dy.reshape(tokens, -1)).reshape(kernel.shape)

    def elsewhere(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jnp.tensordot(x, dy, (batch, batch))

    return dx, jax.lax.platform_dependent(x, dy, cpu=on_cpu, default=elsewhere)


matmul.defvjp(_matmul_forward, _matmul_backward)


constrain = nn.spmd.with_logical_constraint  # an array stays as it is, placed as the table says of its axes


class Linear(nn.Module):
    """`y = x W + b`, over the last `len(shape) - n_out` axes of x.

    Attributes:
        shape: of W, input axes first.
        axes: the logical name of each axis of W, for the sharding table.
        bias: whether there is a b, of the output's shape.
        residual: whether y is added to the residual stream (such weights start smaller).
        n_in: how many axes of W are input.
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
        kept: Any = self.get_variable("params", "kernel")
        if isinstance(kept, Transposed):
            lead = x.shape[: x.ndim - self.n_in]
            y = transposed_matmul(x.reshape(*lead, -1), kept, self.dtype).astype(self.dtype)
            y = y.reshape(*lead, *self.shape[self.n_in :])
        else:
            kernel: jax.Array = self.param("kernel", partitioned(kernel_init, self.axes), self.shape)
            y = matmul(x.astype(self.dtype), kernel.astype(self.dtype), self.n_in)
        if self.bias:
            axes, shape = self.axes[self.n_in :], self.shape[self.n_in :]
            bias: jax.Array = self.param("bias", partitioned(bias_init, axes), shape)
            y = y + jnp.expand_dims(bias.astype(self.dtype), range(y.ndim - bias.ndim))
        return y


class Embedding(nn.Module):
    """A table `[rows, D]`; row `i` is the vector of id `i`."""

    config: ModelConfig
    rows: int
    axes: tuple[str, str]
    dtype: jnp.dtype

    def setup(self) -> None:
        std = 1.0 if self.config.init == "torch" else self.config.init_std
        init = partitioned(nn.initializers.normal(std), self.axes)
        kept: Any = self.get_variable("params", "embedding")
        if not isinstance(kept, Transposed):
            kept = self.param("embedding", init, (self.rows, self.config.n_embd))
        self.embedding: jax.Array | Transposed = kept

    def __call__(self, ids: jax.Array) -> jax.Array:
        if isinstance(self.embedding, Transposed):
            rows, scale = jnp.take(self.embedding.values, ids, axis=0).astype(self.dtype), self.embedding.scale
            return rows if scale is None else rows * jnp.take(scale, ids, axis=0)[..., None].astype(self.dtype)
        return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Scores of every row, `x E^T`: the tied head."""
        if isinstance(self.embedding, Transposed):
            return transposed_matmul(x_BTD, self.embedding)
        if x_BTD.shape[1] == 1:
            # Decoding. A transposed table under a single row becomes, on a CPU, a fusion that costs a fifth more.
            table_VD = self.embedding.astype(self.dtype)
            return jax.lax.dot_general(x_BTD.astype(self.dtype), table_VD, (((2,), (1,)), ((), ())))
        return matmul(x_BTD.astype(self.dtype), self.embedding.T.astype(self.dtype), 1)


def partitioned(init: nn.initializers.Initializer, axes: tuple[str, ...]) -> Callable[..., Any]:
    """An initialiser whose array carries the logical names of its axes, in a box that is taken off after init."""
    return nn.with_logical_partitioning(init, axes)


def initializers(
    config: ModelConfig, fan_in: int, residual: bool
) -> tuple[nn.initializers.Initializer, nn.initializers.Initializer]:
    """Initialisers of a kernel and its bias.

    `gpt2`: N(0, std), residual projections N(0, std / sqrt(2 L)), biases zero (Radford et al. 2019, section 2.3).
    `zero-proj`: the same with residual projections at zero, so that every block starts as the identity.
    `torch`: both uniform in +-1 / sqrt(fan_in), the default of `torch.nn.Linear`.
    """
    if config.init == "torch":
        bound = 1 / math.sqrt(fan_in)

        def uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return uniform, uniform
    if residual and config.init == "zero-proj":
        return nn.initializers.zeros, nn.initializers.zeros
    std = config.init_std / math.sqrt(2 * config.n_layer) if residual else config.init_std
    return nn.initializers.normal(std), nn.initializers.zeros
