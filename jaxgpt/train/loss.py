"""Next-token cross entropy, as a sum and a count: sums add up over micro-batches and devices, means do not."""

from __future__ import annotations

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


def token_count(targets_BT: jax.Array) -> jax.Array:
    """How many targets are counted, as a float32 scalar."""
    return (targets_BT >= 0).sum().astype(jnp.float32)
