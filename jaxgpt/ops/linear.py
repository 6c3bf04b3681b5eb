"""Linear layers, log probabilities of ids, and sums of squares."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, w: Any, b: jax.Array | None, dtype: Any) -> jax.Array:
    """Compute `x W + b` in `dtype`: `[..., in]` to `[..., out]`.

    Args:
        x: inputs.
        w: weight `[in, out]`, an array or a stored weight, such as `kernels.stored.Stored`.
        b: bias `[out]`, or None.
        dtype: dtype of the result, and of the product if w is an array.
    """
    y = x.astype(dtype) @ w.astype(dtype)
    # Broadcast in float32, so that the gradient of b, a sum over all tokens, is accumulated in float32.
    return y if b is None else y + jnp.broadcast_to(b, y.shape).astype(dtype)


def log_likelihood(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Compute the log probability of each id, in nats: `[B, T]`, in the dtype of the logits."""
    hits_BTV = ids_BT[..., None] == jax.lax.broadcasted_iota(ids_BT.dtype, logits_BTV.shape, 2)
    return jnp.where(hits_BTV, logits_BTV, 0.0).sum(-1) - jax.nn.logsumexp(logits_BTV, axis=-1)


def squared_norm(x: jax.Array) -> jax.Array:
    """Compute the sum of squares of an array, a float32 scalar."""
    return jnp.square(x.astype(jnp.float32)).sum()
