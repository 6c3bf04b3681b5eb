"""Sums and maxima written so that XLA's CPU backend vectorizes them, which it does not do with its own reductions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.ops.sharding import weights_are_whole

PARTS = 8  # with 16, the compiler would write the elements to memory before it combines them
SHORT = 64  # numbers left to a reduction: 32 or fewer would be computed again wherever their sum is used


def fold(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Combine equal parts of the last axis elementwise: two, four or eight, as long as a part has 33 numbers or more."""
    length, parts = x.shape[-1], 1
    while parts < PARTS and length // parts > SHORT and length % (2 * parts) == 0:
        parts *= 2
    return functools.reduce(combine, jnp.split(x, parts, axis=-1))


@jax.jit  # traced once for each shape
def sum_of_squares(x: jax.Array) -> jax.Array:
    """Compute the sum of the squares of an array, in parts."""
    return fold(jnp.add, jnp.square(x).reshape(-1)).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def broadcast_to_tokens(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a bias or scale to `[B, T, ...]`.

    The gradient is the sum of `dy` over all tokens. On a CPU it is computed as the matrix product of two rows of ones
    with `dy`, `[2, B * T]` and `[B * T, ...]`, which takes an eighth to a third of the time of XLA's reduction (Zen 4).
    """
    return jnp.broadcast_to(x, shape)


def _broadcast_to_tokens_forward(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return jnp.broadcast_to(x, shape), x


def _broadcast_to_tokens_backward(shape: tuple[int, ...], x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    def plain(dy: jax.Array) -> jax.Array:
        return dy.sum(range(dy.ndim - x.ndim))

    def as_product(dy: jax.Array) -> jax.Array:
        # Two rows, because XLA's CPU backend passes their product to a library. For one row it generates code, which it
        # compiles for each bias anew.
        dy_NC = dy.reshape(-1, x.size)
        return (jnp.ones((2, dy_NC.shape[0]), dy.dtype) @ dy_NC)[0].reshape(x.shape)

    return (jax.lax.platform_dependent(dy, cpu=as_product, default=plain) if weights_are_whole() else plain(dy),)


broadcast_to_tokens.defvjp(_broadcast_to_tokens_forward, _broadcast_to_tokens_backward)
