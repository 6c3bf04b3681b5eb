"""Name the gradient in which training diverged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import flatten_params, forward_order
from jaxgpt.model.scan import STACKED


def first_non_finite(model: ModelConfig, params: Any, squared_norms: Sequence[float] | np.ndarray) -> str:
    """Name the gradient that was the first in the backward pass not to be finite, and count the others.

    Args:
        model: the architecture.
        params: a tree with the structure of what is trained: weights, stacked weights or adapters.
        squared_norms: of the gradients, in the order of the leaves (`grad_squares` of the metrics).

    Returns:
        A phrase, or "" if all are finite. If none is, the fault lies before the backward pass, and no gradient is named.
    """
    names = list(flatten_params(params))
    bad = [name for name, value in zip(names, squared_norms, strict=True) if not np.isfinite(value)]
    if not bad:
        return ""
    if len(bad) == len(names):
        return "and no gradient is finite"
    first = max(bad, key=_forward_place(model))
    return f"first in the backward pass in the gradient of {first} ({len(bad)} of {len(names)} gradients)"


def _forward_place(model: ModelConfig) -> Callable[[str], Any]:
    """Return a sort key of paths, for the order in which the forward pass uses the arrays."""
    names = dict.fromkeys(_split(part)[0] for path in forward_order(model) for part in path.split("/"))
    place = {name: index for index, name in enumerate(names)}

    def key(path: str) -> Any:
        # The parts a and b of an adapter are not in the model. They are used in the order of their names.
        parts = ((*_split(part), part) for part in path.split("/"))
        return [(place.get(name, len(place)), layer, part) for name, layer, part in parts]

    return key


def _split(part: str) -> tuple[str, int]:
    """Split `h_12` into `h`, which stacked layers are called, and 12. An adapter of several matrices has the first's place."""
    if part.startswith(f"{STACKED}_"):
        return STACKED, int(part.removeprefix(f"{STACKED}_"))
    return part.split("+")[0], 0
