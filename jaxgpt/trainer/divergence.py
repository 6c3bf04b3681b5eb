"""Divergence: the name of the gradient that became non-finite first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import flatten_params, forward_order

BLOCK = re.compile(r"^h(?:_(\d+))?/")  # prefix of one layer, or of the stacked layers


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
    modules = [path.rpartition("/")[0] for path in forward_order(model)]
    first_block = next(i for i, module in enumerate(modules) if module.startswith("h_0/"))

    def use(path: str) -> tuple[int, int, int, str]:
        block = BLOCK.match(path)
        name = BLOCK.sub("h_0/", path).split("+")[0]  # an adapter of several matrices ranks with the first one
        place = next((i for i, module in enumerate(modules) if f"{name}/".startswith(f"{module}/")), len(modules))
        return (first_block, int(block[1] or 0), place, path) if block else (place, 0, place, path)

    return f"first in the backward pass in the gradient of {max(bad, key=use)} ({len(bad)} of {len(paths)} gradients)"
