"""The base of a run with adapters: the checkpoint that `init_from` names, found by its path and checked by its weights.

The run keeps a reference instead of a copy, which would be a hundred times as large as the adapters. The checksum covers the
weights, not their files, so a base that was copied, exported or imported again is still the same base.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.checkpoint.run import Run, parse_checkpoint
from jaxgpt.checkpoint.store import read_info
from jaxgpt.config import Config, UserError


class FrozenBase(NamedTuple):
    """The frozen weights of a run with adapters.

    Attributes:
        params: the weights.
        checksum: of the weights before any change, such as a shorter context.
    """

    params: Any
    checksum: str


def checksum(tree: Any) -> str:
    """Compute the SHA-256 of the paths, dtypes, shapes and bytes of all leaves."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def locate_base(run: Run, config: Config) -> Path:
    """Return the path of a run's base, or of a folder of its name beside the run, if both have been moved.

    Raises:
        UserError: neither exists.
    """
    base, step = parse_checkpoint(config.init_from)
    for place in (base, run.path.absolute().parent / base.name):
        if (place / "checkpoints" / step).is_dir():
            return place / "checkpoints" / step
    raise UserError(
        f"{run.path} holds adapters of {config.init_from}, which is missing: restore it, put it beside {run.path}, or "
        f"{_other_base(run, config)}"
    )


def check_base(run: Run, config: Config, step: int, found: str, where: Path | str) -> None:
    """Check that weights are equal to those on which the adapters of a checkpoint were trained.

    Args:
        run: the run with adapters.
        config: its settings.
        step: of its checkpoint.
        found: checksum of the weights.
        where: their path.

    Raises:
        UserError: they differ.
    """
    if read_info(run.checkpoints / str(step)).about.get("base", found) != found:
        raise UserError(
            f"{where} is not the base of {run.path}: its weights differ from those that the adapters were trained on; restore "
            f"them, or {_other_base(run, config)}"
        )


def _other_base(run: Run, config: Config) -> str:
    """Return how to name another path of the base."""
    if config.preset == "imported":  # it cannot be resumed
        return "import the adapter again with --init-from BASE"
    return f"name it: jaxgpt train --resume --out {run.path} --init-from BASE"
