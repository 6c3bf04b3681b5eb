"""Next-token cross entropy, as a sum and a count: sums add up over micro-batches and devices, means do not."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """`log sum_v exp(logit_v) - logit_target` for every token, in nats; 0 where the target is negative (no token).

    Args:
        logits_BTV: float32.
        targets_BT: ids; negative ones are not counted.

    Returns:
        float32 `[B, T]`.
    """
    chex.assert_equal_shape_prefix([logits_BTV, targets_BT], 2)
    target = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets_BT >= 0, jax.nn.logsumexp(logits_BTV, axis=-1) - target, 0.0)


def chunked_cross_entropy(
    head: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, targets_BT: jax.Array, chunk: int
) -> jax.Array:
    """`cross_entropy(head(x_BTD), targets_BT)` with the logits of `chunk` positions of each row at a time.

    The backward pass computes a chunk's logits again: B x chunk x V numbers are held instead of B x T x V, for one product
    with the head more.

    Args:
        head: hidden states to logits, each position on its own.
        x_BTD: hidden states.
        targets_BT: as of `cross_entropy`.
        chunk: positions, at most T; the last chunk is filled up with targets that do not count.
    """
    B, T, D = x_BTD.shape
    chunk = min(chunk, T)
    fill = -T % chunk
    x_nBcD = jnp.pad(x_BTD, ((0, 0), (0, fill), (0, 0))).reshape(B, -1, chunk, D).swapaxes(0, 1)
    targets_nBc = jnp.pad(targets_BT, ((0, 0), (0, fill)), constant_values=-1).reshape(B, -1, chunk).swapaxes(0, 1)

    @jax.checkpoint
    def losses(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        return cross_entropy(head(piece[0]), piece[1])

    return jax.lax.map(losses, (x_nBcD, targets_nBc)).swapaxes(0, 1).reshape(B, -1)[:, :T]


def token_count(targets_BT: jax.Array) -> jax.Array:
    """How many targets are counted, as a float32 scalar: exact up to 2^24 of them.

    Added up as such: over several devices it then travels with the gradients. An integer would be a sum of its own, early,
    and on a CPU the device that comes to it first keeps a thread while it waits, which the others need.
    """
    return (targets_BT >= 0).sum(dtype=jnp.float32)
