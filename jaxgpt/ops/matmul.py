"""Matrix products with weights, float32 or quantized."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxgpt.ops.cpu import transposed_copy
from jaxgpt.ops.quantize import QuantizedMatrix, product_with_rows, quantized_matmul, quantized_rows

Weight = jax.Array | QuantizedMatrix


def matmul(x: jax.Array, weight: Weight, n_in: int = 1, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Contract the last `n_in` axes of x with the first `n_in` axes of a weight, in `dtype`."""
    if isinstance(weight, QuantizedMatrix):
        lead = x.shape[: x.ndim - n_in]
        y = quantized_matmul(x.reshape(*lead, -1), weight, dtype).astype(dtype)
        return y.reshape(*lead, *weight.shape[n_in:])
    return _matmul(x.astype(dtype), weight.astype(dtype), n_in)


def take_rows(table_VD: Weight, ids: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Look up rows of a table: ids `[...]` to `[..., D]` in `dtype`. Ids must be in range, which is not checked."""
    if isinstance(table_VD, QuantizedMatrix):
        return quantized_rows(table_VD, ids, dtype)
    return jnp.take(table_VD, ids, axis=0).astype(dtype)


def matmul_rows(x_BTD: jax.Array, table_VD: Weight, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Compute `x E^T`, the inner product with every row of a table: `[B, T, V]`."""
    if isinstance(table_VD, QuantizedMatrix):
        return quantized_matmul(x_BTD, table_VD)
    if x_BTD.shape[1] == 1:
        # Decoding: for a single row, XLA's CPU backend makes a fusion of the transposed table that is a fifth slower.
        return product_with_rows(x_BTD[:, 0].astype(dtype), table_VD.astype(dtype))[:, None]
    return _matmul(x_BTD.astype(dtype), table_VD.T.astype(dtype), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, kernel: jax.Array, n_in: int) -> jax.Array:
    """Compute `tensordot(x, kernel, n_in)`, with explicit gradients `dx = dy W^T` and `dW = x^T dy`.

    With JAX's own gradient, XLA's CPU backend would recompute the residual stream of every layer to transpose x.
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
        x, dy = x.reshape(tokens, -1), dy.reshape(tokens, -1)
        if dy.size + kernel.size < x.size:  # less to transpose with dW = (dy^T x)^T
            return transposed_copy(transposed_copy(dy) @ x).reshape(kernel.shape)
        return (transposed_copy(x) @ dy).reshape(kernel.shape)

    def elsewhere(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jnp.tensordot(x, dy, (batch, batch))

    return dx, jax.lax.platform_dependent(x, dy, cpu=on_cpu, default=elsewhere)


_matmul.defvjp(_matmul_forward, _matmul_backward)
