"""Disk space: compare the size of a run's checkpoints with the free space, before the first step."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.index import saved_steps
from jaxgpt.checkpoint.replacement import replaced_run
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import TrainConfig
from jaxgpt.directories import NEW, REPLACED, RUN_FILES
from jaxgpt.errors import UserError

COMPRESSED = 0.8  # assumed lower bound of the size of compressed weights, relative to memory; measured: 0.92


def check_space(run: Run, state: Any, train: TrainConfig, note: Callable[[str], None], replaced: bool = False) -> None:
    """Compare the largest total size of a run's checkpoints with the free space on its file system.

    Disk quotas are not checked. Optimizer states can be compressed, so only the weights count for the error.

    Args:
        run: the run, which need not exist.
        state: the train state, or its shapes and dtypes.
        train: settings that select the checkpoints to keep.
        note: callback for a warning: not all checkpoints fit.
        replaced: whether a new run replaces the present run and its checkpoints.

    Raises:
        UserError: if the weights of a single checkpoint do not fit.
    """
    total, _, free = shutil.disk_usage(_existing(run.path))
    if not total:  # the size is unknown, as for some network file systems
        return
    present = saved_steps(run.checkpoints)
    if replaced:
        free += sum(_bytes_on_disk(run.path / name) for name in (*RUN_FILES, NEW, REPLACED))  # other files are kept
        present = []
    else:
        old = replaced_run(run.path)  # the old run is deleted before the first checkpoint is written
        free += _bytes_on_disk(old) if old else 0

    size = _bytes_in_memory(state)
    most = most_checkpoints(train)
    needed = size * max(most - len(present), 1)
    available = f"the file system of {run.path} has {format_bytes(free)} of free space"
    facts = f"a checkpoint takes about {format_bytes(size)}, and {available}"
    if free < COMPRESSED * _bytes_in_memory(state.params):
        fix = f"free at least {format_bytes(size - free)} there, or move the run to a different file system"
        raise UserError(f"{facts}: {fix}")
    if free < needed:
        fix = "free space, or lower --train.keep-last and --train.keep-best"
        note(f"{facts}: the run stores up to {most} at a time, {format_bytes(most * size)}; {fix}")


def _bytes_on_disk(path: Path) -> int:
    """Return the bytes that deleting a file or directory tree frees; targets of links and missing files count as 0."""
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(directory, name) for directory, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(OSError):  # a training process deletes checkpoints
            total += file.lstat().st_size
    return total


def most_checkpoints(train: TrainConfig) -> int:
    """Return the largest number of checkpoints of a run at a time: kept checkpoints and the checkpoint being written.

    The best checkpoints on earlier validation data or with earlier evaluators, which a resume may keep, are not counted.
    """
    lasting = train.keep_last + train.keep_best
    if train.keep_every:
        lasting += train.steps // train.keep_every
    if not train.checkpoint_every:
        evaluations = math.ceil(train.steps / train.eval_every)
        lasting = min(lasting, evaluations - 1)  # the checkpoint of the last evaluation counts as being written
    temporary = 1 if train.checkpoint_seconds else 0  # kept in addition to the others, until the next write is complete
    being_written = 1
    return lasting + temporary + being_written


def format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit, as in "1.2 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:  # larger numbers have four digits or more when rounded
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _bytes_in_memory(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
