"""Next-token cross entropy. Losses are summed and counted: sums add up over microbatches and devices, means do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

# (params, tokens_BT, targets_BT, dropout key or None) -> losses_BT, in nats; 0 where the target is negative. For windows with
# segment ids, these are a fifth argument, segment_ids_BT.
LossFn = Callable[..., jax.Array]


def make_loss_fn(apply_fn: Callable[..., Any], chunk: int = 0) -> LossFn:
    """Make the loss function that `train_step` takes: cross entropy of a model's logits, `-log softmax(logits)[target]`.

    Args:
        apply_fn: `GPT(config).apply`, or any `(variables, tokens_BT, key) -> logits_BTV`; with segment ids, they follow `key`.
        chunk: positions of a window whose logits are computed at a time, to save memory (`chunked_cross_entropy`, for a
            model with the methods `hidden` and `head`); 0: all.

    Returns:
        `loss_fn(params, tokens_BT, targets_BT, key) -> losses_BT`, float32 in nats; 0 where the target is negative. `key` is
        for the dropout masks, or None. Segment ids may follow.
    """

    def loss_fn(
        params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, key: jax.Array | None, *segment_ids_BT: jax.Array
    ) -> jax.Array:
        call = partial(apply_fn, {"params": params})
        if not chunk:
            return cross_entropy(call(tokens_BT, key, *segment_ids_BT), targets_BT)
        x_BTD = call(tokens_BT, key, *segment_ids_BT, method="hidden")
        return chunked_cross_entropy(partial(call, method="head"), x_BTD, targets_BT, chunk)

    return loss_fn


def split_windows(windows: jax.Array) -> tuple[jax.Array, ...]:
    """Split windows into inputs and targets, each `[B, T]`, and segment ids if they have them.

    Args:
        windows: `[B, T + 1]`, T inputs and, one further, T targets; or `[B, T, 3]`, the input, target and segment id of each
            position: ids of documents in a row, which attention does not leave. A negative target does not count; a negative
            input, such as the target before it in the first form, is read as id 0.
    """
    parts = (windows[:, :-1], windows[:, 1:]) if windows.ndim == 2 else tuple(jnp.moveaxis(windows, -1, 0))
    return jnp.maximum(parts[0], 0), *parts[1:]


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Compute `log sum_v exp(logit_v) - logit_target` for every token, in nats; 0 where the target is negative (no token).

    Args:
        logits_BTV: float32.
        targets_BT: ids; negative ones are not counted.

    Returns:
        float32 `[B, T]`.
    """
    chex.assert_equal_shape_prefix([logits_BTV, targets_BT], 2)
    ids_BT = jnp.maximum(targets_BT, 0)
    target_BT = jax.lax.platform_dependent(logits_BTV, ids_BT, cpu=_take, default=_take_by_comparison)
    return jnp.where(targets_BT >= 0, jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT, 0.0)


def _take(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits_BTV, ids_BT[..., None], axis=-1)[..., 0]


def _take_by_comparison(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Do the same as `_take`, with a gradient that XLA fuses. That of `_take` is a scatter into float32 `[B, T, V]`."""
    hits_BTV = ids_BT[..., None] == jax.lax.broadcasted_iota(ids_BT.dtype, logits_BTV.shape, 2)
    return jnp.where(hits_BTV, logits_BTV, 0.0).sum(-1)


def chunked_cross_entropy(
    head: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, targets_BT: jax.Array, chunk: int
) -> jax.Array:
    """Compute `cross_entropy(head(x_BTD), targets_BT)` with the logits of `chunk` positions of each row at a time.

    The backward pass recomputes a chunk's logits: memory holds B x chunk x V numbers instead of B x T x V, for one more
    product with the head.

    Args:
        head: hidden states to logits, position by position.
        x_BTD: hidden states.
        targets_BT: as in `cross_entropy`.
        chunk: positions; the last chunk is filled up with targets that do not count.
    """
    B, T, D = x_BTD.shape
    chunk = min(chunk, T)
    fill = -T % chunk
    x_nBcD = jnp.pad(x_BTD, ((0, 0), (0, fill), (0, 0))).reshape(B, -1, chunk, D).swapaxes(0, 1)
    targets_nBc = jnp.pad(targets_BT, ((0, 0), (0, fill)), constant_values=-1).reshape(B, -1, chunk).swapaxes(0, 1)

    @jax.checkpoint
    def losses(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BcD, targets_Bc = inputs
        return cross_entropy(head(x_BcD), targets_Bc)

    return jax.lax.map(losses, (x_nBcD, targets_nBc)).swapaxes(0, 1).reshape(B, -1)[:, :T]


def token_count(targets_BT: jax.Array) -> jax.Array:
    """Count the targets that are not negative, as a float32 scalar, which is exact up to 2^24."""
    # As a float, the count is summed over devices together with the gradients. An integer would be a collective of its own,
    # in which the first device of a CPU would hold a thread that the others need.
    return (targets_BT >= 0).sum(dtype=jnp.float32)
