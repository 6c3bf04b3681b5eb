"""Check that weights match a model: their names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import Model, abstract_params, flatten_params, is_weight, weights


def check_names(params: Any, model: GPT) -> None:
    """Raise `UserError` if a model lacks one of these weights, or needs a weight that is missing."""
    found = dict.fromkeys(weight_names(params))
    expected = weights(model)
    for name in found:
        if name not in expected:
            raise UserError(
                f"{type(model).__name__} has no weight {name}, so it would be ignored: pass the class of the model, as in "
                f"LM(config, params, tokenizer, model=MyGPT) or load(path, model=MyGPT)"
            )
    for name in expected:
        if name not in found:
            raise UserError(f"the weight {name} of {type(model).__name__} is missing: pass the complete weights")


def weight_names(params: Any) -> list[str]:
    """Return the path of every weight, such as "h_0/attn/q_proj/kernel"; a weight stored as several arrays has one path."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def name_difference(stored: Any, expected: Any, model: type[GPT]) -> str:
    """Describe the weights that only a checkpoint or only a model has; "": equal names, or a checkpoint without weights."""
    stored = flatten_params(stored)
    expected = flatten_params(expected)
    if not stored:
        return ""
    lacks = [name for name in stored if name not in expected]
    needs = [name for name in expected if name not in stored]
    if lacks:
        return f"has weights that {model.__name__} lacks ({_some(lacks)})"
    if needs:
        return f"lacks weights of {model.__name__} ({_some(needs)})"
    return ""


def _some(names: Sequence[str]) -> str:
    """Return up to three names, and the number of others."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def first_difference(params: Any, model: Model) -> str:
    """Return the first difference in name, shape or dtype between weights and a model, or ""."""
    found = _descriptions(params)
    expected = _descriptions(abstract_params(model))
    for name in expected | found:
        if found.get(name) != expected.get(name):
            return f"weight {name} is {found.get(name, 'missing')}, but {expected.get(name, 'unknown')} in the model"
    return ""


def _descriptions(params: Any) -> dict[str, str]:
    described = {}
    for name, leaf in flatten_params(params).items():
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        described[name] = f"{dtype} {list(np.shape(leaf))}"
    return described
