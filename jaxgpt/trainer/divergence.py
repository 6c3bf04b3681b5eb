"""Name the gradient in which training diverged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def first_non_finite(params: Any, squared_norms: Sequence[float] | np.ndarray) -> str:
    """Name the gradient that was the first in the backward pass not to be finite, and count the others.

    Args:
        params: a tree with the structure of the weights.
        squared_norms: of the gradients, in the order of the leaves (`grad_squares` of the metrics).

    Returns:
        A phrase, or "" if all are finite.
    """
    names = ["/".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    bad = [index for index, value in enumerate(squared_norms) if not np.isfinite(value)]
    if not bad:
        return ""
    first = max(bad, key=lambda index: (_depth(names[index]), index))
    return f"first in the gradient of {names[first]} ({len(bad)} of {len(names)} gradients)"


def _depth(name: str) -> float:
    """Return the distance of a weight from the input. Within a block, names are in the order of the computation."""
    module = name.split("/")[0]
    if module.startswith("h_"):
        return 1.0 + int(module[2:])
    return 0.0 if module in ("wte", "wpe") else float("inf")
