"""Metrics of a step: from arrays on the devices to numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def metrics_of_steps(metrics: dict[str, jax.Array], n: int) -> list[dict[str, Any]]:
    """Block on the metrics of a call of n steps, and return the metrics of each step."""
    host = jax.device_get(metrics)
    if not host["loss"].ndim:
        return [host]
    return [{name: value[i] for name, value in host.items()} for i in range(n)]


def load_metrics(load_LE: np.ndarray) -> dict[str, Any]:
    """Summarize the loads of experts for each layer: the shares of the tokens' choices, `[L, E]`.

    Each token chooses A of the E experts.
    `load_entropy` is `-sum_e load_e log(load_e) / log(E)`: 1 for equal loads, `log(A) / log(E)` if all tokens have the same
    experts. `largest_share` is the largest load: from 1 / E to 1 / A.
    """
    E = load_LE.shape[-1]
    log_LE = np.log(np.where(load_LE > 0, load_LE, 1.0))
    entropy_L = -(load_LE * log_LE).sum(-1)
    if E == 1:
        entropy_L = np.ones_like(entropy_L)
    else:
        entropy_L = entropy_L / math.log(E)
    return {"load_entropy": entropy_L.tolist(), "largest_share": load_LE.max(-1).tolist()}


# Arrays among the metrics of a step, and the function that computes the numbers to write. Other arrays are written as lists.
SUMMARIES: dict[str, Callable[[np.ndarray], dict[str, Any]]] = {"expert_load": load_metrics}


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Convert scalar metrics to floats, and other arrays to their summaries (`SUMMARIES`) or lists of floats."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        array = np.asarray(value, np.float64)
        if array.ndim and name in SUMMARIES:
            found |= SUMMARIES[name](array)
        else:
            found[name] = array.tolist()
    return found
