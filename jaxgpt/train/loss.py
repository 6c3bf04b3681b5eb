"""Objectives: a summed loss and a count per row, which can be added over microbatches and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import Positions, document_positions


class RowSums(NamedTuple):
    """The sums that an objective computes for each row of a batch; training adds the rows, evaluation reports each.

    Attributes:
        loss_B: summed loss, float32.
        count_B: number of counted tokens, or sum of their weights, float32: the divisor of all sums.
        others: dict of further sums, keyed by name. Divided by the count, they become metrics.
    """

    loss_B: jax.Array
    count_B: jax.Array
    others: Mapping[str, jax.Array] = {}


# An objective maps (params, batch, dropout key or None) to RowSums. A batch is any tree of arrays with rows as first axis.
Objective = Callable[[Any, Any, jax.Array | None], RowSums]


def next_token_loss(apply_fn: Callable[..., Any], chunk: int = 0) -> Objective:
    """Make the objective of language models: `-log softmax(logits)[target]` of the next token, in nats.

    Args:
        apply_fn: `GPT(config).apply`, or any `(variables, tokens_BT, key, positions) -> logits_BTV`.
        chunk: positions of each window per chunk of logits, to save memory (see `chunked`); 0: all. Chunks need the
            model's methods `hidden` and `head`.

    Returns:
        An objective for batches of windows (see `split_windows`).
    """

    def objective(params: Any, windows: jax.Array, key: jax.Array | None) -> RowSums:
        inputs_BT, targets_BT, positions = split_windows(windows)
        call = partial(apply_fn, {"params": params})
        if chunk:
            x_BTD = call(inputs_BT, key, positions, method="hidden")
            losses_BT = chunked(lambda x, y: cross_entropy(call(x, method="head"), y), x_BTD, targets_BT, chunk)
        else:
            losses_BT = cross_entropy(call(inputs_BT, key, positions), targets_BT)
        return RowSums(losses_BT.sum(-1), (targets_BT >= 0).sum(-1, dtype=jnp.float32))

    return objective


def split_windows(windows: jax.Array) -> tuple[jax.Array, jax.Array, Positions | None]:
    """Split windows into inputs and targets, each `[B, T]`, and positions; None: one document per row.

    Args:
        windows: `[B, T + 1]`: T inputs and, shifted by one, T targets; or `[B, T, 3]`: input, target and document id of each
            position. A negative target is not counted. Inputs with negative ids are read as id 0.
    """
    if windows.ndim == 2:
        return jnp.maximum(windows[:, :-1], 0), windows[:, 1:], None
    inputs_BT, targets_BT, document_BT = jnp.moveaxis(windows, -1, 0)
    return jnp.maximum(inputs_BT, 0), targets_BT, document_positions(document_BT)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Compute each token's cross entropy in nats, `[B, T]`, at least float32; 0 for negative targets."""
    chex.assert_equal_shape_prefix([logits_BTV, targets_BT], 2)
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return jnp.where(targets_BT >= 0, -log_likelihood(logits_BTV, jnp.maximum(targets_BT, 0)), 0.0)


def log_likelihood(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Compute the log probability of each id, in nats: `[B, T]`, in the dtype of the logits."""
    # A lookup would need the logits of the whole vocabulary on each device; a comparison works on any part of it.
    hits_BTV = ids_BT[..., None] == jax.lax.broadcasted_iota(ids_BT.dtype, logits_BTV.shape, 2)
    return jnp.where(hits_BTV, logits_BTV, 0.0).sum(-1) - jax.nn.logsumexp(logits_BTV, axis=-1)


def chunked(
    losses: Callable[[jax.Array, jax.Array], jax.Array], x_BTD: jax.Array, targets_BT: jax.Array, chunk: int
) -> jax.Array:
    """Compute `losses(x_BTD, targets_BT)` for `chunk` positions of each row at a time.

    Memory holds B x chunk x V logits instead of B x T x V. The backward pass recomputes the logits, at the cost of one
    more product with the head. The last chunk is padded with targets that are not counted.
    """
    B, T, D = x_BTD.shape
    chunk = min(chunk, T)
    fill = -T % chunk
    x_nBcD = jnp.pad(x_BTD, ((0, 0), (0, fill), (0, 0))).reshape(B, -1, chunk, D).swapaxes(0, 1)
    targets_nBc = jnp.pad(targets_BT, ((0, 0), (0, fill)), constant_values=-1).reshape(B, -1, chunk).swapaxes(0, 1)
    losses_nBc = jax.lax.map(jax.checkpoint(lambda each: losses(*each)), (x_nBcD, targets_nBc))
    return losses_nBc.swapaxes(0, 1).reshape(B, -1)[:, :T]
