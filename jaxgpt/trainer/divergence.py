"""Divergence: the name of the gradient that became non-finite first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import flatten_params, weights

LEAF = re.compile(r"(\+[^/]+)?/(a|b/[^/]+|[^/]+)$")  # the weight of a module, or an adapter of one or several matrices


def first_non_finite(model: ModelConfig, params: Any, squared_norms: Sequence[float] | np.ndarray) -> str:
    """Return the first non-finite gradient of the backward pass and the number of others; "" if all are finite.

    If no gradient is finite, the forward pass failed, and no gradient is named.

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
    places = {LEAF.sub("", path): place for place, path in enumerate(weights(model))}

    def place(path: str) -> tuple[int, str]:
        """Return the place of a module in the forward pass; stacked layers have the places of the first layer."""
        return places.get(LEAF.sub("", re.sub(r"^h/", "h_0/", path)), len(places)), path

    return f"first in the backward pass in the gradient of {max(bad, key=place)} ({len(bad)} of {len(paths)} gradients)"
