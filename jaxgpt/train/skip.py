"""An optimizer wrapper that skips bad updates: non-finite updates and spikes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgpt.train.clip import global_norm

HORIZON = 50  # number of steps that the running means average over; no earlier step counts as a spike


class SkipStatistics(NamedTuple):
    """Running statistics that decide whether an update is applied.

    Attributes:
        in_a_row: int32, updates skipped since the last applied update.
        total: int32, updates skipped.
        seen: int32, updates with a finite loss and gradient, applied or skipped.
        loss: running mean, in nats per token.
        grad_norm: running mean.
    """

    in_a_row: jax.Array
    total: jax.Array
    seen: jax.Array
    loss: jax.Array
    grad_norm: jax.Array


class SkipState(NamedTuple):
    """The state of `skip_bad_updates`.

    Attributes:
        applied: boolean, whether the last update was applied.
        statistics: statistics for the next decision.
        inner_state: the state of the wrapped optimizer.
    """

    applied: jax.Array
    statistics: SkipStatistics
    inner_state: Any


def skip_bad_updates(
    optimizer: optax.GradientTransformation, spike_factor: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it skips non-finite updates and spikes.

    A skipped update changes neither the weights nor the state of the optimizer, including its schedule. Unlike
    `optax.apply_if_finite`, bad updates are never applied, regardless of how many are skipped in a row.

    Args:
        optimizer: any optax transformation.
        spike_factor: as in `should_apply`.

    Returns:
        A transformation with `update(grads, state, params, value=loss, grad_norm=norm)`; an omitted `grad_norm` is
        computed.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> SkipState:
        return init_skip_state(optimizer.init(params))

    def update(
        grads: Any,
        state: SkipState,
        params: Any = None,
        *,
        value: jax.Array,
        grad_norm: jax.Array | None = None,
        **extra: Any,
    ) -> Any:
        norm = global_norm(grads) if grad_norm is None else grad_norm
        applied, statistics = should_apply(state.statistics, value, norm, spike_factor)
        extra |= {"value": value, "grad_norm": norm}
        updates, inner_state = optimizer.update(grads, state.inner_state, params, **extra)
        # Adding -0.0 does not change any bit of a weight; adding 0.0 would turn -0.0 into 0.0.
        updates = jax.tree.map(lambda u: jnp.where(applied, u, -jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(partial(jnp.where, applied), inner_state, state.inner_state)
        return updates, SkipState(applied, statistics, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def init_skip_state(inner_state: Any) -> SkipState:
    """Make the state before the first step."""
    # One array per field, because donated buffers must not alias.
    counts, means = (jnp.zeros((), jnp.int32) for _ in range(3)), (jnp.zeros((), jnp.float32) for _ in range(2))
    return SkipState(jnp.ones((), jnp.bool_), SkipStatistics(*counts, *means), inner_state)


def should_apply(
    statistics: SkipStatistics, loss: jax.Array, grad_norm: jax.Array, spike_factor: float
) -> tuple[jax.Array, SkipStatistics]:
    """Return whether loss and norm are finite and at most `spike_factor` times their means.

    The means follow `m <- m + (min(x, spike_factor m) - m) max(1 / n, 1 / HORIZON)`: a spike moves the means little, and a
    persistent level is eventually accepted.

    Args:
        statistics: statistics of the previous steps.
        loss: loss of the batch.
        grad_norm: global norm of the gradient.
        spike_factor: largest accepted ratio to the running means; 0: skip only non-finite updates.

    Returns:
        A boolean scalar, and the new statistics.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    values, means = jnp.stack([loss, grad_norm]), jnp.stack([statistics.loss, statistics.grad_norm])
    applied, clipped = finite, values
    if spike_factor:
        highest = jnp.where(statistics.seen >= HORIZON, spike_factor * means, jnp.inf)
        applied = finite & (values <= highest).all()
        clipped = jnp.minimum(values, highest)
    seen = statistics.seen + finite
    weight = 1 / jnp.clip(seen, 1, HORIZON).astype(means.dtype)  # no float64 under x64
    means = jnp.where(finite, means + (clipped - means) * weight, means)
    in_a_row = jnp.where(applied, 0, statistics.in_a_row + 1)
    return applied, SkipStatistics(in_a_row, statistics.total + ~applied, seen, means[0], means[1])


def skip_state(opt_state: Any) -> SkipState | None:
    """Find the `skip_bad_updates` state within an optimizer state; None if updates are never skipped."""
    found: SkipState | None = optax.tree.get(opt_state, "SkipState")
    return found
