"""Start from the weights of another run: check that the models match."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import numpy as np

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.model.params import crop_positions

FREE = ("dropout", "block_size")


def check_start(old: ModelConfig, new: ModelConfig) -> None:
    """Check that the models differ at most in dropout and in the context, which may be shorter.

    Raises:
        UserError: another setting differs; it is named.
    """
    for field in fields(ModelConfig):
        was, is_now = getattr(old, field.name), getattr(new, field.name)
        if was != is_now and field.name not in FREE:
            raise UserError(
                f"model.{field.name} must be {was!r}, as in the run of --init-from, not {is_now!r}: leave it out"
            )
    if new.block_size > old.block_size and old.positions == "learned":
        raise UserError(f"model.block_size {new.block_size}: the run to start from has only {old.block_size} positions")


def cropped(params: Any, config: ModelConfig) -> Any:
    """Return the weights on the host, without the positions past the context."""
    return crop_positions(jax.tree.map(np.asarray, params), config)
