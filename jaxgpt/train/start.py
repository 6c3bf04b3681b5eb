"""Beginning with weights that exist: what of the model may differ from theirs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import numpy as np

from jaxgpt.config import ModelConfig, UserError

FREE = ("dropout", "block_size")


def check_start(old: ModelConfig, new: ModelConfig) -> None:
    """Only dropout may differ, and the context, which may be shorter.

    Raises:
        UserError: another setting does; it is named.
    """
    for field in fields(ModelConfig):
        was, is_now = getattr(old, field.name), getattr(new, field.name)
        if was != is_now and field.name not in FREE:
            raise UserError(
                f"model.{field.name} is {was!r} in the run to begin with: {is_now!r} would need other weights"
            )
    if new.block_size > old.block_size and old.positions == "learned":
        raise UserError(
            f"model.block_size {new.block_size}: the run to begin with knows {old.block_size} positions only"
        )


def cropped(params: Any, config: ModelConfig) -> Any:
    """Weights on the host, without the positions past the context."""
    params = jax.tree.map(np.asarray, params)
    if "wpe" in params:
        params = params | {"wpe": {"embedding": params["wpe"]["embedding"][: config.block_size]}}
    return params
