"""One optimizer step, as a pure function of state and batch. The caller compiles, places and donates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxgpt.ops.random import named_key
from jaxgpt.ops.sharding import add_over_devices
from jaxgpt.train.clip import global_norm, squared_norms
from jaxgpt.train.loss import LossFn, split_windows, token_count
from jaxgpt.train.skip import skip_state


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
        step: int32, steps taken.
        params: the weights, float32.
        opt_state: the state of the optax optimizer.
        ema: the average of the weights, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any


def init_state(params: Any, optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """Make the state before the first step.

    Args:
        params: the weights, float32.
        optimizer: any optax transformation.
        ema: keep an average of the weights.
    """
    average = jax.tree.map(jnp.copy, params) if ema else None
    # Copied, because some optimizers keep the weights themselves, and an array cannot be donated twice.
    opt_state = jax.tree.map(jnp.copy, optimizer.init(params))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average)


def loss_sum(
    params: Any, windows_BT1: jax.Array, key: jax.Array | None, loss_fn: LossFn
) -> tuple[jax.Array, jax.Array]:
    """Compute the summed loss in nats and the number of counted tokens of windows (see `split_windows`)."""
    inputs_BT, targets_BT, *segment_ids_BT = split_windows(windows_BT1)
    return loss_fn(params, inputs_BT, targets_BT, key, *segment_ids_BT).sum(), token_count(targets_BT)


def gradients(
    params: Any,
    windows_BT1: jax.Array,
    key: jax.Array | None,
    loss_fn: LossFn,
    accumulation: int,
    data_axis: str | None = None,
) -> tuple[jax.Array, Any]:
    """Compute the mean loss over all tokens of a batch and its gradient, in `accumulation` microbatches.

    Microbatches and devices add up sums, which are divided once by the number of tokens: the result does not depend on their
    number. `data_axis` is that of `train_step`.
    """
    chex.assert_rank(windows_BT1, {2, 3})
    sums, parts = partial(gradient_sums, key=key, loss_fn=loss_fn, accumulation=accumulation), accumulation
    if data_axis is not None and key is None:
        sums = partial(add_over_devices, sums, data_axis)
        parts *= jax.sharding.get_abstract_mesh().shape[data_axis]
    if len(windows_BT1) % parts:
        devices = f" on each of {parts // accumulation} devices" if parts > accumulation else ""
        raise ValueError(f"{len(windows_BT1)} windows cannot be split into {accumulation} equal microbatches{devices}")
    (total, count), grads = sums(params, windows_BT1)
    # A product is fused into what reads the gradients; a division would write and read them once more. Without a counted
    # target, loss and gradients are 0.
    count = jnp.maximum(count, 1)
    inverse = 1 / count
    return total / count, jax.tree.map(lambda g: g * inverse, grads)


def gradient_sums(
    params: Any, windows_BT1: jax.Array, key: jax.Array | None, loss_fn: LossFn, accumulation: int
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Compute the sums of `loss_sum` over microbatches, and the gradient of the summed loss."""
    grad = jax.value_and_grad(partial(loss_sum, loss_fn=loss_fn), has_aux=True)
    if accumulation == 1:
        return grad(params, windows_BT1, key)
    # Row r goes to microbatch r % A: every device keeps its rows.
    microbatches = windows_BT1.reshape(-1, accumulation, *windows_BT1.shape[1:]).swapaxes(0, 1)

    def add(sums: Any, microbatch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        windows, index = microbatch
        new = grad(params, windows, None if key is None else jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, new), None

    zero = jnp.zeros((), jnp.float32)
    start = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, start, (microbatches, jnp.arange(accumulation)))[0]


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
    data_axis: str | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take one optimizer step: a pure function `(state, batch) -> (state, metrics)`.

    `step = jax.jit(partial(train_step, loss_fn=make_loss_fn(model.apply), optimizer=optimizer))`. The new state has the
    structure, shapes and types of the old one, so that it can be donated (`donate_argnums=0`).

    Args:
        state: of `init_state`, with the same optimizer.
        windows_BT1: int32 `[B, T + 1]`: T inputs and, one further, T targets; a negative target does not count. With
            documents, `[B, T, 3]` (see `split_windows`).
        loss_fn: of `make_loss_fn`, or any of its signature.
        optimizer: any optax transformation.
        learning_rate: its schedule, for the metrics alone; None: they have no `lr`.
        seed: of the dropout masks, which are a function of (seed, step).
        accumulation: number of microbatches, which divides B (B per device with `data_axis`); the result is the same.
        dropout: whether loss_fn is given a key.
        ema_decay: `ema <- ema_decay ema + (1 - ema_decay) params`, if the state has an average. A skipped update
            (`skip_bad_updates`) leaves it unchanged, as it does the weights and the optimizer.
        data_axis: the mesh axis that divides the batch, if nothing else is divided: each device computes the gradients of its
            rows, and small gradients are added over the devices as one array (`add_over_devices`). None: the compiler divides
            the step, as it does with dropout, because the masks are drawn for the whole batch.

    Returns:
        The new state, and the metrics: `loss` (mean nats per token, before the update), `grad_norm` (before clipping), `lr`,
        `grad_squares` (squared norm of every gradient, `[leaves]`) and, if the optimizer skips bad updates, `skipped` and
        `skipped_in_a_row`.
    """
    key = named_key(seed, "dropout", state.step) if dropout else None
    loss, grads = gradients(state.params, windows_BT1, key, loss_fn, accumulation, data_axis)
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, state.opt_state, state.params, value=loss)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": global_norm(grads), "grad_squares": squared_norms(grads)}
    if learning_rate is not None:
        metrics["lr"] = learning_rate(_schedule_step(state))
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda old, new: ema_decay * old + (1 - ema_decay) * new, ema, params)
    if (skip := skip_state(opt_state)) is not None:
        metrics |= {"skipped": skip.statistics.total, "skipped_in_a_row": skip.statistics.in_a_row}
        # For the weights this changes nothing but rounding: the sum is compiled as it is without the wrapper.
        keep = partial(jnp.where, skip.applied)
        params, ema = jax.tree.map(keep, (params, ema), (state.params, state.ema))
    return TrainState(state.step + 1, params, opt_state, ema), metrics


def _schedule_step(state: TrainState) -> jax.Array:
    """Return the step of the learning-rate schedule, which skipped updates do not advance."""
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    return counts[0][1] if counts else state.step


def train_steps(
    state: TrainState,
    windows_KBT1: jax.Array,
    n: jax.typing.ArrayLike,
    *,
    step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take `n` optimizer steps, one after the other, without the host in between.

    The loop is compiled once for any n, and the number of steps in a call changes no bit of the results.

    Args:
        state: the state before.
        windows_KBT1: int32, a batch for each of up to K steps.
        n: number of steps, at most K.
        step: `train_step`, with all but its first two arguments.

    Returns:
        The state after, and the metrics of each step, `[K, ...]`; those beyond n are zero.
    """
    shapes = jax.eval_shape(step, state, windows_KBT1[0])[1]
    zeros = jax.tree.map(lambda x: jnp.zeros((len(windows_KBT1), *x.shape), x.dtype), shapes)

    def one(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, all_metrics = carry
        state, metrics = step(state, windows_KBT1[i])
        return state, jax.tree.map(lambda row, x: row.at[i].set(x), all_metrics, metrics)

    result: tuple[TrainState, Any] = jax.lax.fori_loop(0, n, one, (state, zeros))
    return result


def eval_step(params: Any, windows_BT1: jax.Array, *, loss_fn: LossFn) -> tuple[jax.Array, jax.Array]:
    """Compute the summed loss and the number of tokens of each window, `[B]` and `[B]`; both are 0 for a window of -1."""
    inputs_BT, targets_BT, *segment_ids_BT = split_windows(windows_BT1)
    losses_BT = loss_fn(params, inputs_BT, targets_BT, None, *segment_ids_BT)
    return losses_BT.sum(-1), (targets_BT >= 0).sum(-1)
