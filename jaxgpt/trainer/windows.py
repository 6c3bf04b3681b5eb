"""The loss of each validation window in the last evaluation of a run: `evaluation.json`.

Two runs that were evaluated on the same windows are compared window by window (`jaxgpt.study.difference`). This module imports
JAX only to compute a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxgpt.atomic import write_json
from jaxgpt.directories import EVALUATION
from jaxgpt.files import damaged, read_own_json

if TYPE_CHECKING:
    from jaxgpt.data.batches import Windows

MOST_WINDOWS = 1 << 18  # largest number of windows to write, about 8 MB
ROWS = 256  # windows read at a time


class WindowLosses(NamedTuple):
    """The losses of one evaluation.

    Attributes:
        windows: digest of the evaluated windows (`digest`).
        sums_W: summed loss of each window in nats, float64 `[W]`.
        counts_W: number of predicted tokens of each window, or sum of their weights, float64 `[W]`.
    """

    windows: str
    sums_W: np.ndarray
    counts_W: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Summed loss of each window, divided by the mean token count of a window; the mean of these values is the loss."""
        return self.sums_W / self.counts_W.mean()

    @property
    def shares(self) -> np.ndarray:
        """Number of tokens of each window, divided by the mean number of tokens of a window."""
        return self.counts_W / self.counts_W.mean()


def digest(rows: Windows) -> str:
    """Return the SHA-256 of windows: equal if and only if all inputs, targets and document ids are equal."""
    import jax

    hashed = hashlib.sha256()
    for first in range(0, len(rows), ROWS):
        for leaf in jax.tree.leaves(rows[first : first + ROWS]):
            array = np.ascontiguousarray(leaf)
            hashed.update(f"{array.shape[1:]} {array.dtype}".encode())
            hashed.update(array.data)
    return hashed.hexdigest()


def write_windows(run: Path, step: int, loss: float, losses: WindowLosses) -> None:
    """Write the mean loss and the window losses of the evaluation after `step` steps; replace an existing file."""
    entries = {
        "step": step,
        "val_loss": loss,
        "windows": losses.windows,
        "sums": losses.sums_W.tolist(),
        "counts": losses.counts_W.tolist(),
    }
    write_json(run / EVALUATION, entries)


def read_windows(run: Path, line: Mapping[str, Any]) -> WindowLosses | None:
    """Read the losses of an evaluation; None: the run has no file, or the file is from a different evaluation.

    Args:
        run: directory of the run.
        line: line of the evaluation in metrics.jsonl.

    Raises:
        UserError: if the file is damaged.
    """
    path = run / EVALUATION
    if not path.exists():
        return None
    fix = "delete it; runs are then compared without it"
    entries = read_own_json(path, fix)
    if entries.get("step") != line["step"] or entries.get("val_loss") != line["val_loss"]:
        return None
    sums_W = _numbers(entries.get("sums"))
    counts_W = _numbers(entries.get("counts"))
    is_valid = 0 < len(sums_W) == len(counts_W) and counts_W.sum() > 0 and isinstance(entries.get("windows"), str)
    if not is_valid:
        raise damaged(path, fix)
    return WindowLosses(entries["windows"], sums_W, counts_W)


def _numbers(values: Any) -> np.ndarray:
    """Return a list of numbers as an array; for any other value, return an empty array."""
    is_list = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    return np.array(values if is_list else [], np.float64)
