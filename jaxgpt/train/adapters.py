"""Objectives of adapters: the frozen arrays of a run with adapters, and the merge of base and adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxgpt.model.lora import merge
from jaxgpt.train.loss import Objective, RowSums


class FrozenParts(NamedTuple):
    """The frozen arrays of a run with adapters, if its objective reads arrays other than the base, such as a teacher.

    Attributes:
        base: weights that the adapters change.
        of_objective: argument `frozen` of the objective.
    """

    base: Any
    of_objective: Any


# frozen arrays of a run         base_of    of_objective
# base (with adapters)           base       base, the weights before training
# FrozenParts(base, teacher)     base       teacher
# teacher (no adapters)                     teacher


def base_of(frozen: Any) -> Any:
    """Return the base of adapters from the frozen arrays of a run with adapters."""
    return frozen.base if isinstance(frozen, FrozenParts) else frozen


def of_objective(frozen: Any) -> Any:
    """Return the arrays that an objective receives as `frozen` from the frozen arrays of a run."""
    return frozen.of_objective if isinstance(frozen, FrozenParts) else frozen


def with_adapters(objective: Objective, alpha: float) -> Objective:
    """Make the objective of adapters: `params` are adapters, `frozen` the weights they change (`model/lora.py`).

    The given objective receives the merged weights as `params`, and the unchanged weights as `frozen`. A preference loss
    thus has the base of the adapters as its reference, without a second copy. If `frozen` is a `FrozenParts`, the given
    objective receives its `of_objective` instead.
    """

    def adapted(params: Any, batch: Any, key: jax.Array | None, frozen: Any) -> RowSums:
        merged = merge(base_of(frozen), params, alpha)
        return objective(merged, batch, key, of_objective(frozen))

    return adapted
