"""Starting from the weights of another run: which of its checkpoints, and what of the model may differ."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.config import ModelConfig, UserError

FREE = ("dropout", "block_size")


def split_checkpoint(init_from: str) -> tuple[Path, str]:
    """Split `--init-from`, a run or one of its checkpoints (RUN/checkpoints/STEP), into the run and `best` or the step."""
    path = Path(init_from)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return path.parent.parent, path.name
    return path, "best"


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
