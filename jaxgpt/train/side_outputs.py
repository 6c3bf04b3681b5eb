"""Side outputs of blocks, such as the losses of routers: their sums per row, metrics and penalties."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.errors import short_repr
from jaxgpt.model.gpt import SideOutputs
from jaxgpt.suggestions import did_you_mean

# Side outputs that are always 0, because only their gradient matters. They are not metrics.
WITHOUT_VALUE = ("router_bias",)


def router_penalties(config: Config) -> dict[str, float]:
    """Return the factors above 0 of the side outputs of routers that are minimized with the loss; {} without experts."""
    if not config.model.n_experts:
        return {}
    o = config.optim
    factors = {"balance_loss": o.balance_loss, "router_z_loss": o.router_z_loss}
    if config.model.router_bias:
        factors["router_bias"] = 1.0  # zeros: only the gradient matters
    return {name: factor for name, factor in factors.items() if factor}


def side_sums(sides: SideOutputs, targets_BT: jax.Array) -> dict[str, jax.Array]:
    """Sum the side outputs of each row over its counted targets: at least float32, `[B]`, or `[B, ...]` for arrays.

    As in the loss, padding counts 0.

    Args:
        sides: side outputs, from the model's method `hidden_and_sides`. A value of a row, `[B, 1]`, counts once per target.
        targets_BT: targets, negative if not counted.

    Raises:
        ValueError: if a side output is neither `[B, T, ...]` nor `[B, 1, ...]`.
    """
    B, T = targets_BT.shape
    sums = {}
    for name, side_BT in sides.items():
        if side_BT.shape[:2] not in ((B, T), (B, 1)):
            raise ValueError(f"side output {name} has shape {side_BT.shape}; expected {(B, T)}, or {(B, 1)} for rows")
        side_BT = side_BT.astype(jnp.promote_types(side_BT.dtype, jnp.float32))
        is_counted = (targets_BT >= 0).reshape(B, T, *(1,) * (side_BT.ndim - 2))
        sums[name] = jnp.where(is_counted, side_BT, 0.0).sum(1)
    return sums


def side_means(sides: SideOutputs, targets_BT: jax.Array) -> dict[str, jax.Array]:
    """Compute the means of side outputs over the counted targets of each row: at least float32, `[B]` or `[B, ...]`.

    The means of a row without counted targets are 0. Use means in objectives that count rows, such as answers, instead of
    tokens. Arguments as for `side_sums`.
    """
    count_B = jnp.maximum((targets_BT >= 0).sum(-1, dtype=jnp.float32), 1)
    sums = side_sums(sides, targets_BT)
    means = {}
    for name, sum_B in sums.items():
        means[name] = sum_B / count_B.reshape(-1, *(1,) * (sum_B.ndim - 1))
    return means


def side_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the side outputs that are metrics."""
    return {name: each for name, each in sums.items() if name not in WITHOUT_VALUE}


def penalty_of(sums: Mapping[str, jax.Array], penalties: Mapping[str, float]) -> jax.Array | None:
    """Return the sum of the penalties of each row, each multiplied by its factor; None: no penalties.

    Raises:
        ValueError: if a penalty has no sum `[B]`.
    """
    penalty_B = None
    values = {name: each for name, each in sums.items() if each.ndim == 1}
    for name, factor in penalties.items():
        if name not in values:
            known = ", ".join(values) or "blocks that return side outputs"
            raise ValueError(
                f"no side output {short_repr(name)} for a penalty{did_you_mean(name, values)}: use {known}"
            )
        weighted_B = factor * values[name]
        penalty_B = weighted_B if penalty_B is None else penalty_B + weighted_B
    return penalty_B
