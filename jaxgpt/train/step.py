"""One update, as a pure function of state and batch. Compilation, placement and donation are the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxgpt.ops.random import named_key
from jaxgpt.train.loss import token_count
from jaxgpt.train.skip import Guard, init_guard, judge, squares

# (params, tokens_BT, targets_BT, dropout key or None) -> losses_BT, in nats; 0 where the target is negative
LossFn = Callable[[Any, jax.Array, jax.Array, jax.Array | None], jax.Array]


class TrainState(NamedTuple):
    """Everything that an update changes.

    Attributes:
        step: int32, updates made.
        params: the weights, float32.
        opt_state: optax's.
        ema: the average of the weights, or None where none is kept.
        guard: what is remembered of updates that were left out, or None where none ever is.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any
    guard: Guard | None = None


def init_state(
    params: Any, optimizer: optax.GradientTransformation, ema: bool = False, guard: bool = False
) -> TrainState:
    """Make the state before the first step.

    Args:
        params: the weights, float32.
        optimizer: any optax transformation.
        ema: keep an average of the weights.
        guard: keep what `train_step` needs to skip bad updates.
    """
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        optimizer.init(params),
        jax.tree.map(jnp.copy, params) if ema else None,
        init_guard() if guard else None,
    )


def loss_sum(
    params: Any, windows_BT1: jax.Array, key: jax.Array | None, loss_fn: LossFn
) -> tuple[jax.Array, jax.Array]:
    """Summed loss in nats and number of tokens, over windows of T inputs and, one further, T targets."""
    inputs_BT, targets_BT = windows_BT1[:, :-1], windows_BT1[:, 1:]
    return loss_fn(params, inputs_BT, targets_BT, key).sum(), token_count(targets_BT)


def gradients(
    params: Any, windows_BT1: jax.Array, key: jax.Array | None, loss_fn: LossFn, accumulation: int
) -> tuple[jax.Array, Any]:
    """Mean loss over all tokens of a batch, and its gradient, worked through in `accumulation` pieces.

    The pieces add up sums, which are divided once by the number of tokens: the result does not depend on the pieces.
    """
    chex.assert_rank(windows_BT1, 2)
    grad = jax.value_and_grad(partial(loss_sum, loss_fn=loss_fn), has_aux=True)
    if accumulation == 1:
        (total, count), grads = grad(params, windows_BT1, key)
    else:
        # Row r goes to piece r % A: every device keeps the rows it has.
        pieces = windows_BT1.reshape(-1, accumulation, windows_BT1.shape[1]).swapaxes(0, 1)

        def add(sums: Any, piece: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            windows, index = piece
            piece_key = None if key is None else jax.random.fold_in(key, index)
            (loss, tokens), g = grad(params, windows, piece_key)
            return jax.tree.map(jnp.add, sums, (loss, tokens, g)), None

        zero = jnp.zeros((), jnp.float32)
        start = (zero, zero, jax.tree.map(jnp.zeros_like, params))
        (total, count, grads), _ = jax.lax.scan(add, start, (pieces, jnp.arange(accumulation)))
    return total / count, jax.tree.map(lambda g: g / count, grads)


def train_step(
    state: TrainState,
    windows_BT1: jax.Array,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule | None = None,
    seed: int = 0,
    accumulation: int = 1,
    dropout: bool = False,
    ema_decay: float = 0.0,
    spike_factor: float = 0.0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take one optimizer step: a pure function `(state, batch) -> (state, metrics)`.

    `step = jax.jit(partial(train_step, loss_fn=make_loss_fn(model), optimizer=optimizer))`. The new state has the structure,
    shapes and types of the old one, so that it can be donated (`donate_argnums=0`).

    Args:
        state: of `init_state`, with the same optimizer.
        windows_BT1: int32 `[B, T + 1]`: T inputs and, one further, T targets; a negative target does not count.
        loss_fn: of `make_loss_fn`, or any of its signature.
        optimizer: any optax transformation.
        learning_rate: its schedule, for the metrics alone; None: they have no `lr`.
        seed: of the dropout masks, which are a function of (seed, step).
        accumulation: pieces in which the batch is worked through; the result is the same.
        dropout: whether loss_fn is given a key.
        ema_decay: `ema <- ema_decay ema + (1 - ema_decay) params`, where the state keeps one.
        spike_factor: as `judge` takes it, where the state has a guard. An update that is left out changes nothing but
            the step: not the weights, the optimizer, its schedule or the average.

    Returns:
        The new state, and the metrics: `loss` (mean nats per token, before the update), `grad_norm` (before clipping), `lr`,
        `grad_squares` (squared norm of every gradient, `[leaves]`) and, with a guard, `skipped` and `skipped_in_a_row`.
    """
    key = named_key(seed, "dropout", state.step) if dropout else None
    loss, grads = gradients(state.params, windows_BT1, key, loss_fn, accumulation)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda old, new: ema_decay * old + (1 - ema_decay) * new, ema, params)
    grad_norm = optax.tree.norm(grads).astype(jnp.float32)
    metrics = {"loss": loss, "grad_norm": grad_norm, "grad_squares": squares(grads)}
    if learning_rate is not None:  # a skipped update does not move the schedule
        metrics["lr"] = learning_rate(state.step - (0 if state.guard is None else state.guard.total))
    if state.guard is None:
        return TrainState(state.step + 1, params, opt_state, ema), metrics
    made, guard = judge(state.guard, loss, grad_norm, spike_factor)
    metrics |= {"skipped": guard.total, "skipped_in_a_row": guard.in_a_row}
    params, opt_state, ema = jax.tree.map(
        partial(jnp.where, made), (params, opt_state, ema), (state.params, state.opt_state, state.ema)
    )
    return TrainState(state.step + 1, params, opt_state, ema, guard), metrics


def train_steps(
    state: TrainState,
    windows_KBT1: jax.Array,
    n: jax.typing.ArrayLike,
    *,
    step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`n` updates, one after the other, without the host between them.

    A loop that is compiled once for any number: how many updates a call makes changes none of their bits.

    Args:
        state: before.
        windows_KBT1: int32, a batch for each of up to K updates.
        n: of them that are made, from the first on.
        step: `train_step`, with all but its first two arguments.

    Returns:
        The state after, and each update's figures, `[K, ...]`; those beyond n are zero.
    """
    figures = jax.eval_shape(step, state, windows_KBT1[0])[1]
    none = jax.tree.map(lambda x: jnp.zeros((len(windows_KBT1), *x.shape), x.dtype), figures)

    def one(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, written = carry
        state, figures = step(state, windows_KBT1[i])
        return state, jax.tree.map(lambda row, x: row.at[i].set(x), written, figures)

    made: tuple[TrainState, Any] = jax.lax.fori_loop(0, n, one, (state, none))
    return made


def eval_step(params: Any, windows_BT1: jax.Array, *, loss_fn: LossFn) -> tuple[jax.Array, jax.Array]:
    """Summed loss and number of tokens of each window, `[B]` and `[B]`; a window of -1 counts for nothing."""
    inputs_BT, targets_BT = jnp.maximum(windows_BT1[:, :-1], 0), windows_BT1[:, 1:]
    losses_BT = loss_fn(params, inputs_BT, targets_BT, None)
    return losses_BT.sum(-1), (targets_BT >= 0).sum(-1)
