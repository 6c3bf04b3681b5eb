"""Divergence: non-finite losses and gradients, and too many skipped updates in a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.errors import TrainingFailed
from jaxgpt.model.params import flatten_params, weights
from jaxgpt.model.scan import STACKED, layer_name
from jaxgpt.trainer.program import Program


class Diverged(TrainingFailed):
    """The loss or the gradients diverged."""


def skip_note(step: int, metrics: Mapping[str, float], skipped: int) -> str:
    """Return the note about a skipped update; arguments as for `check_step`."""
    reason = _non_finite(metrics) or f"loss {metrics['loss']:.4g} or grad_norm {metrics['grad_norm']:.4g} is a spike"
    return f"step {step}: {reason}; update skipped ({skipped} in a row)"


def check_step(
    program: Program, step: int, metrics: Mapping[str, float], skipped: int, squared_norms: Sequence[float] | np.ndarray
) -> None:
    """Check that a run has not diverged.

    Args:
        program: program of the run.
        step: number of the step.
        metrics: metrics of the step.
        skipped: number of updates skipped in a row, including this one; 0: the update was applied.
        squared_norms: squared norms of the gradients, the metric `grad_squares`.

    Raises:
        Diverged: if the loss or gradient is non-finite and `optim.not_finite` is stop, or `optim.skip_limit` updates in a
            row were skipped.
    """
    optim = program.config.optim
    non_finite = _non_finite(metrics)
    too_many = skipped >= optim.skip_limit
    must_stop = bool(non_finite) and optim.not_finite == "stop"
    if not must_stop and not too_many:
        return
    after = f" after {skipped} skipped updates in a row" if too_many else ""
    event = f"{non_finite or 'a spike'} at step {step}{after}"
    gradient = first_non_finite(program.config.model, program.abstract.state.params, squared_norms)
    raise Diverged(f"{event}, {gradient}" if gradient else event)


def _non_finite(metrics: Mapping[str, float]) -> str:
    """Describe the first non-finite metric, as in "loss is nan", or return ""."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            return f"{name} is {metrics[name]}"
    return ""


def first_non_finite(model: ModelConfig, params: Any, squared_norms: Sequence[float] | np.ndarray) -> str:
    """Describe the first non-finite gradient of the backward pass; return "" if all are finite.

    The description contains the gradient's path and the number of non-finite gradients, unless no gradient is finite, as when
    the loss is NaN.

    Args:
        model: the architecture.
        params: a tree with the structure of the trained parameters: weights, stacked weights or adapters.
        squared_norms: squared norms of the gradients, in the order of the leaves (`grad_squares` of the metrics).
    """
    paths = list(flatten_params(params))
    bad = [path for path, value in zip(paths, squared_norms, strict=True) if not np.isfinite(value)]
    if not bad:
        return ""
    if len(bad) == len(paths):
        return "and no gradient is finite"
    # `weights` has the order of the forward pass. The backward pass computes the modules in the reverse order.
    position = {path.rpartition("/")[0]: i for i, path in enumerate(weights(model))}
    first = max(bad, key=lambda path: (position.get(_module(path, position), len(position)), path))
    return f"first in the backward pass in the gradient of {first} ({len(bad)} of {len(paths)} gradients)"


def _module(path: str, modules: Mapping[str, Any]) -> str:
    """Return the path of the module in `modules` that owns a weight or adapter, or "" if no module does.

    A stacked weight, `h/...`, belongs to the first layer. Adapters that share A, such as `h_0/attn/q_proj+v_proj/b/v_proj`,
    belong to the first of their matrices.
    """
    if path.startswith(f"{STACKED}/"):
        path = layer_name(0) + path.removeprefix(STACKED)
    path, _, _ = path.partition("+")
    while path and path not in modules:
        path, _, _ = path.rpartition("/")
    return path
