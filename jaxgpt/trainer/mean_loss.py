"""The mean loss over windows, with its standard error, and differences of such losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxgpt.data import Windows
from jaxgpt.errors import UserError


class Evaluation(NamedTuple):
    """The mean loss over the tokens of the evaluated windows, with its standard error.

    Attributes:
        loss: mean loss, nats per token.
        stderr: standard error of the loss over windows; NaN for a single window.
        windows: number of windows.
        tokens: number of predicted tokens, each counted once, or sum of their weights, rounded.
        ranking: mean loss over the windows common to all evaluations of a run, for comparing its checkpoints.
        sums: summed loss of each window in nats, float64 `[windows]`.
        counts: number of predicted tokens of each window, or sum of their weights, float64 `[windows]`.
        seconds: wall time of the evaluation.
        others: further sums of the objective, divided by the sum of `counts`.
        rows: the evaluated windows; None: unknown.
    """

    loss: float
    stderr: float
    windows: int
    tokens: int
    ranking: float
    sums: np.ndarray
    counts: np.ndarray
    seconds: float = 0.0
    others: Mapping[str, float] = {}
    rows: Windows | None = None

    @property
    def deviations(self) -> np.ndarray:
        """`(sum - loss * count) / mean(count)` of each window; `stderr` is the standard error of their mean."""
        return (self.sums - self.loss * self.counts) / self.counts.mean()

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers in `metrics.jsonl`."""
        others = {f"val_{name}": value for name, value in self.others.items()}
        return others | {
            "val_loss": self.loss,
            "val_stderr": self.stderr,
            "val_windows": self.windows,
            "val_seconds": self.seconds,
        }

    def __str__(self) -> str:
        """Format the loss and its standard error, if known, as `1.4697 +- 0.0068`."""
        return f"{self.loss:.4f}" + (f" +- {self.stderr:.4f}" if math.isfinite(self.stderr) else "")


def summarize(sums: np.ndarray, counts: np.ndarray, shared: np.ndarray | slice = slice(None)) -> Evaluation:
    """Compute the mean loss over all tokens, and its standard error.

    `stderr = std(sums - loss * counts) / mean(counts) / sqrt(windows)`; for equal counts, `std(window means) / sqrt(windows)`.
    `sums`, `counts` and the results are as in `Evaluation`; `shared` has the indices of the windows for `ranking`.

    Raises:
        UserError: if no token of the shared windows is counted.
    """
    sums = sums.astype(np.float64)
    counts = counts.astype(np.float64)
    if not counts[shared].sum():
        raise UserError(
            "no token of the evaluated windows is counted in the loss: use longer documents, or evaluate on more windows"
        )
    loss = float(sums.sum() / counts.sum())
    ranking = float(sums[shared].sum() / counts[shared].sum())
    result = Evaluation(
        loss=loss,
        stderr=math.nan,
        windows=len(sums),
        tokens=round(counts.sum()),
        ranking=ranking,
        sums=sums,
        counts=counts,
    )
    return result._replace(stderr=_stderr(result.deviations))


class LossDifference(NamedTuple):
    """A difference of mean losses in nats per token, with its standard error (NaN for a single window)."""

    mean: float
    stderr: float


def loss_difference(before: Evaluation, after: Evaluation) -> LossDifference:
    """Compute `after.loss - before.loss` of two evaluations on the same windows, and its standard error.

    The differences per window vary much less than the losses: both evaluations have the same hard and easy windows.
    """
    stderr = _stderr(after.deviations - before.deviations)
    return LossDifference(mean=after.loss - before.loss, stderr=stderr)


def _stderr(deviations: np.ndarray) -> float:
    """Compute the standard error of a mean, `std / sqrt(n)`; NaN for a single number."""
    n = len(deviations)
    if n <= 1:
        return math.nan
    return float(deviations.std(ddof=1) / math.sqrt(n))
