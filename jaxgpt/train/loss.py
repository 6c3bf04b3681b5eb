"""Objectives: a summed loss and a count per row, which can be added over microbatches and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.model.gpt import SideOutputs
from jaxgpt.ops.attention import Positions, document_positions, row_positions
from jaxgpt.train.at_positions import at_positions, computes_only_answers
from jaxgpt.train.side_outputs import penalty_of, side_metrics, side_sums


class RowSums(NamedTuple):
    """The sums that an objective computes for each row of a batch; training adds them over rows, evaluation keeps each row.

    Attributes:
        loss_B: summed loss, float32.
        count_B: number of counted tokens, or sum of their weights, float32: the divisor of all sums.
        others: dict of further sums, `[B]` or `[B, ...]`, keyed by name. Divided by the count, they become metrics.
        penalty_B: summed penalty, minimized with the loss, but no part of the reported loss; None: no penalty.
    """

    loss_B: jax.Array
    count_B: jax.Array
    others: Mapping[str, jax.Array] = {}
    penalty_B: jax.Array | None = None

    @property
    def minimized(self) -> jax.Array:
        """The sum to minimize: loss plus penalty."""
        return self.loss_B if self.penalty_B is None else self.loss_B + self.penalty_B


# An objective maps (params, batch, dropout key or None, frozen) to RowSums. A batch is any tree of arrays with rows as first
# axis. `frozen` is any tree of arrays that are read, but not trained, such as a reference model; `()`: no such arrays.
Objective = Callable[[Any, Any, jax.Array | None, Any], RowSums]


def next_token_loss(
    apply_fn: Callable[..., Any],
    chunk: int = 0,
    penalties: Mapping[str, float] | None = None,
    order: np.ndarray | None = None,
) -> Objective:
    """Make the objective of language models: `-log softmax(logits)[target]` of the next token, in nats.

    Args:
        apply_fn: `GPT(config).apply`, or any `(variables, tokens_BT, key, positions) -> logits_BTV`.
        chunk: positions of each window per chunk of logits, to save memory (see `chunked`); 0: all. Chunks need the
            model's methods `hidden_and_sides` and `head`.
        penalties: factors of the side outputs of blocks to minimize with the loss; {}: no penalties; None: ignore side
            outputs. Unless `penalties` is None, all side outputs except `WITHOUT_VALUE` become metrics, and the model needs
            the same methods as for chunks.
        order: order in which the model receives the tokens of a window, `[T]`, with their positions; None: unchanged. Without
            dropout, the order changes the sums of a row only by rounding.

    Returns:
        An objective for batches of windows (see `split_windows`). It ignores `frozen`.

    Raises:
        ValueError: when the objective is called, if no block returns the side output of a penalty, or a side output has a
            wrong shape.
    """
    forward = Forward(apply_fn, chunk, with_sides=penalties is not None, order=order)

    def objective(params: Any, windows: jax.Array, key: jax.Array | None, frozen: Any = ()) -> RowSums:
        losses_BT, targets_BT, sides = forward(params, windows, key)
        loss_B = losses_BT.sum(-1)
        count_B = (targets_BT >= 0).sum(-1, dtype=jnp.float32)
        sums = side_sums(sides, targets_BT)
        return RowSums(loss_B, count_B, side_metrics(sums), penalty_of(sums, penalties or {}))

    return objective


def token_losses(
    apply_fn: Callable[..., Any],
    params: Any,
    windows: jax.Array,
    key: jax.Array | None = None,
    chunk: int = 0,
    longest: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Compute `-log p` of each target, at least float32 `[B, T]`, 0 for negative targets; also return the targets.

    Arguments as for `next_token_loss` and its objective, and `longest` as for `Forward`.
    """
    forward = Forward(apply_fn, chunk, longest=longest)
    losses_BT, targets_BT, _ = forward(params, windows, key)
    return losses_BT, targets_BT


@dataclass(frozen=True)
class Forward:
    """The forward pass of objectives: a function of (params, windows, key).

    It returns the results of `token_losses`, and the side outputs of the blocks. Positions are in the order `order`.

    Attributes:
        apply_fn, chunk: as for `next_token_loss`.
        with_sides: whether to return the side outputs of the blocks; false: return {} instead.
        order: as for `next_token_loss`.
        longest: maximum number of consecutive positions that contain all targets of a row, such as the tokens of one answer.
            Logits are computed only at this number of positions, unless positions are sharded. 0: all positions.
    """

    apply_fn: Callable[..., Any]
    chunk: int = 0
    with_sides: bool = False
    order: np.ndarray | None = None
    longest: int = 0

    def __call__(
        self, params: Any, windows: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, SideOutputs]:
        """Compute the losses, the targets and the side outputs; arguments as for the objective of `next_token_loss`."""
        inputs_BT, targets_BT, positions = split_windows(windows)
        if self.order is not None:
            inputs_BT, targets_BT, positions = _in_order(self.order, inputs_BT, targets_BT, positions)

        call = partial(self.apply_fn, {"params": params})
        has_parts = bool(self.chunk) or computes_only_answers(self.longest, inputs_BT.shape[1])
        if not has_parts and not self.with_sides:
            return cross_entropy(call(inputs_BT, key, positions), targets_BT), targets_BT, {}

        def losses(x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
            return cross_entropy(call(x_BTD, method="head"), targets_BT)

        x_BTD, sides = call(inputs_BT, key, positions, method="hidden_and_sides")
        losses_BT = at_positions(losses, x_BTD, targets_BT, self.chunk, self.longest)
        return losses_BT, targets_BT, sides if self.with_sides else {}


def _in_order(
    order: np.ndarray, inputs_BT: jax.Array, targets_BT: jax.Array, positions: Positions | None
) -> tuple[jax.Array, jax.Array, Positions]:
    """Permute inputs, targets and positions along the window."""
    chex.assert_shape(inputs_BT, (None, len(order)))  # JAX would clamp indices out of range
    rows = inputs_BT, targets_BT, positions or row_positions(len(order))
    permuted: tuple[jax.Array, jax.Array, Positions] = jax.tree.map(lambda x: x[:, order], rows)
    return permuted


def split_windows(windows: jax.Array) -> tuple[jax.Array, jax.Array, Positions | None]:
    """Split windows into inputs and targets, each `[B, T]`, and positions; None: one document per row.

    Args:
        windows: `[B, T + 1]`: T inputs and, shifted by one, T targets; or `[B, T, 3]`: input, target and document id of each
            position. A negative target is not counted. Inputs with negative ids are read as id 0.
    """
    if windows.ndim == 2:
        inputs_BT = jnp.maximum(windows[:, :-1], 0)
        return inputs_BT, windows[:, 1:], None
    inputs_BT, targets_BT, document_BT = jnp.moveaxis(windows, -1, 0)
    return jnp.maximum(inputs_BT, 0), targets_BT, document_positions(document_BT)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Compute each token's cross entropy in nats, `[B, T]`, at least float32; 0 for negative targets."""
    chex.assert_equal_shape_prefix([logits_BTV, targets_BT], 2)
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    counted_BT = targets_BT >= 0
    log_p_BT = log_likelihood(logits_BTV, jnp.maximum(targets_BT, 0))
    return jnp.where(counted_BT, -log_p_BT, 0.0)


def log_likelihood(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Compute the log probability of each id, in nats: `[B, T]`, in the dtype of the logits."""
    # A lookup would need the logits of the whole vocabulary on each device; a comparison works on any shard of the vocabulary.
    id_BTV = jax.lax.broadcasted_iota(ids_BT.dtype, logits_BTV.shape, 2)
    is_target_BTV = ids_BT[..., None] == id_BTV
    target_logit_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(-1)
    return target_logit_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
