"""Reductions in parts. XLA's CPU backend vectorizes these, but not its own reductions of many numbers to one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.ops.sharding import weights_are_whole

PARTS = 8  # with 16, the compiler would write the elements to memory before it combines them
SHORT = 64  # numbers left to a reduction: 32 or fewer would be computed again wherever their sum is used
HALVINGS = 5


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
    """Broadcast a weight to `[B, T, ...]`. On a CPU, its gradient, the sum over all tokens, is computed by halves of T."""
    return jnp.broadcast_to(x, shape)


@broadcast_to_tokens.defjvp
def _broadcast_to_tokens_jvp(
    shape: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents

    def plain(dx: jax.Array) -> jax.Array:
        return jnp.broadcast_to(dx, shape)

    def by_doubling(dx: jax.Array) -> jax.Array:
        # Reverse mode transposes this: an array concatenated with itself becomes the sum of two halves. With eight parts at
        # once, the compiler would compute the gradient that is summed a second time, inside the sum.
        batch, length, *rest = shape
        doublings = min(HALVINGS, (length & -length).bit_length() - 1)  # how often T can be halved
        dy = jnp.broadcast_to(dx, (batch, length >> doublings, *rest))
        for _ in range(doublings):
            dy = jnp.concatenate([dy, dy], axis=1)
        return dy

    in_parts = len(shape) >= x.ndim + 2 and weights_are_whole()
    dy = jax.lax.platform_dependent(dx, cpu=by_doubling, default=plain) if in_parts else plain(dx)
    return broadcast_to_tokens(x, shape), dy
