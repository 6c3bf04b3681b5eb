"""Divergence: the name of the gradient that became non-finite first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import flatten_params, forward_order

LAYER = re.compile(r"^h_(\d+)/")


def first_non_finite(model: ModelConfig, params: Any, squared_norms: Sequence[float] | np.ndarray) -> str:
    """Name the first non-finite gradient of the backward pass, and count the others; "" if all are finite.

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
    forward = dict.fromkeys(part for path in forward_order(model) for part in LAYER.sub("h/", path).split("/"))
    order = {part: i for i, part in enumerate(forward)}

    def use(path: str) -> list[Any]:
        layer = int(number[1]) if (number := LAYER.match(path)) else 0
        parts = LAYER.sub("h/", path).split("/")  # an adapter of several matrices is used with the first of them
        return [(order.get(part.split("+")[0], len(order)), layer, part) for part in parts]

    return f"first in the backward pass in the gradient of {max(bad, key=use)} ({len(bad)} of {len(paths)} gradients)"
