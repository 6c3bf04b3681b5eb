"""Sums and maxima written so that XLA's CPU backend vectorizes them, which it does not do with its own reductions."""

from __future__ import annotations

import functools
import math
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def broadcast_to_tokens(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a bias or scale to `[B, T, ...]`.

    The gradient is the sum of `dy` over all tokens. On a CPU it is computed as the matrix product of a row of ones with
    `dy`, `[1, B * T]` and `[B * T, ...]`, which takes an eighth to a third of the time of XLA's reduction (Zen 4).
    """
    return jnp.broadcast_to(x, shape)


@broadcast_to_tokens.defjvp
def _broadcast_to_tokens_jvp(
    shape: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents

    def plain(dx: jax.Array) -> jax.Array:
        return jnp.broadcast_to(dx.astype(jnp.float32), shape).astype(dx.dtype)  # transposed: a sum in float32

    def as_product(dx: jax.Array) -> jax.Array:
        # Reverse mode transposes this. If the ones were the right operand, the compiler would transpose dy first.
        ones = jnp.ones((math.prod(shape[: len(shape) - dx.ndim]), 1), dx.dtype)
        return jax.lax.dot(ones, dx.reshape(1, -1)).reshape(shape)

    dy = jax.lax.platform_dependent(dx, cpu=as_product, default=plain) if weights_are_whole() else plain(dx)
    return broadcast_to_tokens(x, shape), dy
