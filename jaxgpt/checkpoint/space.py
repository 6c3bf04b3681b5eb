"""Disk space: compare the size of a run's checkpoints with the free space, before the first step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.index import saved_steps
from jaxgpt.checkpoint.run import Run, replaced_run
from jaxgpt.config import TrainConfig
from jaxgpt.errors import UserError

COMPRESSED = 0.8  # lowest size of compressed weights, relative to their size in memory; measured: 0.92


def check_space(run: Run, state: Any, train: TrainConfig, note: Callable[[str], None], replaced: bool = False) -> None:
    """Compare the largest total size of a run's checkpoints with the free space on its file system.

    Quotas are unknown. Optimizer states can be compressed, so only the weights count for the error.

    Args:
        run: the run, which need not exist.
        state: the train state, or its shapes and dtypes.
        train: settings that select the checkpoints to keep.
        note: callback for a warning: not all checkpoints fit.
        replaced: whether the new run replaces the present one and its checkpoints.

    Raises:
        UserError: if the weights of a single checkpoint do not fit.
    """
    total, _, free = shutil.disk_usage(_existing(run.path))
    if not total:  # unknown, as for some network file systems
        return
    present = saved_steps(run.checkpoints)
    if replaced:
        free += _bytes_in(run.path)
        present = []
    else:
        old = replaced_run(run.path)  # deleted before the first checkpoint
        free += _bytes_in(old) if old else 0

    one = _bytes(state)
    most = most_checkpoints(train)
    needed = one * max(most - len(present), 1)
    facts = f"a checkpoint takes about {readable(one)}, and the file system of {run.path} has {readable(free)} of free space"
    if free < COMPRESSED * _bytes(state.params):
        fix = f"free at least {readable(one - free)} there, or move the run to a different file system"
        raise UserError(f"{facts}: {fix}")
    if free < needed:
        fix = "free space, or lower --train.keep-last and --train.keep-best"
        note(f"{facts}: the run stores up to {most} at a time, {readable(most * one)}; {fix}")


def _bytes_in(directory: Path) -> int:
    """Return the size of all files in a directory tree."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def most_checkpoints(train: TrainConfig) -> int:
    """Return the largest number of checkpoints of a run at a time: kept checkpoints and the checkpoint being written."""
    kept = train.keep_last + train.keep_best
    if train.keep_every:
        kept += train.steps // train.keep_every
    is_scheduled = not train.checkpoint_every and not train.checkpoint_seconds
    if is_scheduled:
        kept = min(kept, math.ceil(train.steps / train.eval_every) - 1)
    return kept + 1


def readable(count: float) -> str:
    """Format a number of bytes with a decimal unit, as in "1.2 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
