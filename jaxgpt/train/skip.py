"""The decision to skip bad updates: non-finite updates and spikes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Effective number of finite updates in the running means. The first `HORIZON` finite updates never count as spikes.
HORIZON = 50


class SkipStatistics(NamedTuple):
    """Running statistics that decide whether an update is applied.

    Attributes:
        in_a_row: int32, updates skipped since the last applied update.
        total: int32, number of skipped updates since the start.
        seen: int32, updates with a finite loss and gradient, applied or skipped.
        loss: running mean of the loss.
        grad_norm: running mean of the global norm of the gradient.
    """

    in_a_row: jax.Array
    total: jax.Array
    seen: jax.Array
    loss: jax.Array
    grad_norm: jax.Array


def init_statistics() -> SkipStatistics:
    """Return the initial statistics."""
    # Make one array per field, because donated buffers must not alias.
    return SkipStatistics(
        in_a_row=jnp.zeros((), jnp.int32),
        total=jnp.zeros((), jnp.int32),
        seen=jnp.zeros((), jnp.int32),
        loss=jnp.zeros((), jnp.float32),
        grad_norm=jnp.zeros((), jnp.float32),
    )


def should_apply(
    statistics: SkipStatistics, loss: jax.Array, grad_norm: jax.Array, spike_factor: float
) -> tuple[jax.Array, SkipStatistics]:
    """Return whether an update is finite and not a spike, and the new statistics.

    Unlike with `optax.apply_if_finite`, bad updates are never applied, regardless of how many are skipped in a row.

    A mean m of x follows `m <- m + (min(x, spike_factor * m) - m) / min(n, HORIZON)` at finite update n, with x instead of the
    minimum if `n <= HORIZON` or `spike_factor` is 0. A spike moves the means little; a lasting increase is eventually accepted.

    Args:
        statistics: statistics of the previous steps.
        loss: mean loss of the batch; must be positive for a `spike_factor` above 0.
        grad_norm: global norm of the gradient.
        spike_factor: maximum ratio of loss and norm to their means after `HORIZON` finite updates; 0: skip no spikes.

    Returns:
        A boolean scalar, and the new statistics.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    values = jnp.stack([loss, grad_norm])
    means = jnp.stack([statistics.loss, statistics.grad_norm])
    applied = finite
    clipped = values
    if spike_factor:
        highest = jnp.where(statistics.seen >= HORIZON, spike_factor * means, jnp.inf)
        applied = finite & (values <= highest).all()
        clipped = jnp.minimum(values, highest)

    seen = statistics.seen + finite
    weight = 1 / jnp.clip(seen, 1, HORIZON).astype(means.dtype)  # not float64 under jax_enable_x64
    # A spike is finite, so it also updates the means, but only with its clipped value.
    means = jnp.where(finite, means + (clipped - means) * weight, means)

    new = SkipStatistics(
        in_a_row=jnp.where(applied, 0, statistics.in_a_row + 1),
        total=statistics.total + ~applied,
        seen=seen,
        loss=means[0],
        grad_norm=means[1],
    )
    return applied, new
