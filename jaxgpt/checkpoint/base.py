"""Frozen base of a run with adapters: a checkpoint of another run, located by its path and identified by a checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.checkpoint.run import Run, parse_checkpoint
from jaxgpt.checkpoint.store import read_info, resolve_step
from jaxgpt.config import Config
from jaxgpt.errors import UserError


class FrozenBase(NamedTuple):
    """Frozen weights of a run with adapters, and their checksum."""

    params: Any
    checksum: str


def checksum(tree: Any) -> str:
    """Compute the SHA-256 of weights, not of their files: it is the same after an export and import."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def weights_at(init_from: str) -> Path:
    """Return the checkpoint of `--init-from`, which is a run (its best checkpoint) or RUN/checkpoints/STEP."""
    directory, which = parse_checkpoint(init_from)
    return Run(directory).checkpoints / str(resolve_step(Run(directory).checkpoints, which))


def locate_base(run: Run, config: Config) -> Path:
    """Return the path of a run's base: the recorded path, or a sibling directory of the same name if both were moved."""
    base, step = parse_checkpoint(config.init_from)
    for path in (base, run.path.absolute().parent / base.name):
        if (path / "checkpoints" / step).is_dir():
            return path / "checkpoints" / step
    raise UserError(
        f"{run.path} holds adapters of {config.init_from}, which is missing: restore it, or move it next to {run.path}"
    )


def check_base(run: Run, step: int, digest: str, path: Path | str) -> None:
    """Check that the weights at `path`, with the checksum `digest`, are the base of the adapters in a checkpoint."""
    if read_info(run.checkpoints / str(step)).about.get("base", digest) != digest:
        raise UserError(f"{path} is not the base of {run.path}: its weights differ from the base of the adapters")
