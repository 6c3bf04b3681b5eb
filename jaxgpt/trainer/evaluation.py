"""Evaluation: evaluators as values; the loss on a split, or on evenly spaced windows of it, with its standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxgpt.data import Data, Split, Windows
from jaxgpt.errors import UserError
from jaxgpt.parallel.rows import batch_ways, put
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.train.loss import RowSums
from jaxgpt.trainer.prefetch import prefetched
from jaxgpt.trainer.program import Program

AHEAD = 2  # number of later batches dispatched before blocking on a batch


class Result(Protocol):
    """The result of an evaluator."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers for `metrics.jsonl`; NaN and infinities are omitted there."""
        ...

    @property
    def ranking(self) -> float:
        """Lower is better. The first evaluator of a run ranks its checkpoints, and decides about `train.patience`.

        A checkpoint with a non-finite ranking has no rank.
        """
        ...


class Watch(NamedTuple):
    """The state of the run that an evaluator may need.

    Attributes:
        final: whether this is the last evaluation of the run, which may take longer.
        step: number of steps taken.
        data: the data of the run; None: the evaluator brings its own.
        interrupted: called between batches, with equal results in all processes; True: stop and return None.
        progress: called with the number of evaluated examples and the total.
        wait: waits for a batch, but may return earlier, for example on a signal; call `interrupted` next.
    """

    final: bool = True
    step: int = 0
    data: Data | None = None
    interrupted: Callable[[], bool] = lambda: False
    progress: Progress = NO_PROGRESS
    wait: Callable[[Future[Any]], None] = lambda future: None


NO_RUN = Watch()  # for an evaluation outside a run


class Measured(NamedTuple):
    """The result of a custom evaluator: numbers by name, and a ranking (NaN: none), which only the first evaluator needs."""

    metrics: Mapping[str, float]
    ranking: float = math.nan

    def __str__(self) -> str:
        """Format the numbers as `accuracy 0.9062, reward 0.8125`."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())


class Evaluation(NamedTuple):
    """The mean loss over the tokens of the evaluated windows, with its standard error.

    Attributes:
        loss: mean loss, nats per token.
        stderr: standard error of the loss over windows; NaN for a single window.
        windows: number of windows.
        tokens: number of predicted tokens, each counted once.
        ranking: mean loss over the windows common to all evaluations of a run, for comparing its checkpoints.
        sums: summed loss of each window in nats, float64 `[windows]`.
        counts: number of predicted tokens of each window, or sum of their weights, float64 `[windows]`.
        seconds: wall time of the evaluation.
        others: further sums of the objective, divided by the number of tokens.
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


# An evaluator maps (program, params, watch) to a result, or None if interrupted. `params` are the `eval_params` of a state, on
# their devices. Examples: the loss on a split, the score of a task, a mean reward.
Evaluator = Callable[[Program, Any, Watch], Result | None]


def run_evaluators(evaluators: Sequence[Evaluator], program: Program, params: Any, watch: Watch) -> list[Result] | None:
    """Return the result of each evaluator, in their order; None if one was interrupted."""
    results = []
    for evaluator in evaluators:
        result = evaluator(program, params, watch)
        if result is None:
            return None
        results.append(result)
    return results


@dataclass(frozen=True)
class ValidationLoss:
    """The default evaluator of a run: the loss on a split; before the last evaluation, on `train.eval_windows` windows of it.

    Attributes:
        split: the split to evaluate; None: the validation split of the run.
    """

    split: Split | None = None

    @property
    def ranks_by(self) -> str:
        """Name of the ranking: the loss on the validation split of the run, or on a different split."""
        return "loss" if self.split is None else "loss on a split given in Python"

    def __call__(self, program: Program, params: Any, watch: Watch) -> Evaluation | None:
        """Compute the loss."""
        split = self.split
        if split is None:
            assert watch.data is not None, "the data of the run"
            split = watch.data.val
        return evaluate(program, params, split, watch)


@dataclass(frozen=True)
class Every:
    """An evaluator that is called at fewer evaluations than the others, because it takes long.

    Attributes:
        evaluator: the evaluator. It cannot be the first of a run, which ranks the checkpoints.
        steps: call it after every multiple of this number of steps, and at the last evaluation; 0: only at the last evaluation.
    """

    evaluator: Evaluator
    steps: int

    def __call__(self, program: Program, params: Any, watch: Watch) -> Result | None:
        """Call the evaluator if it is due; otherwise, return a result without numbers."""
        is_due = watch.final or bool(self.steps and watch.step % self.steps == 0)
        if not is_due:
            return Measured({}, math.inf)
        return self.evaluator(program, params, watch)


def evaluate(program: Program, params: Any, tokens: Split, watch: Watch = NO_RUN) -> Evaluation | None:
    """Compute the loss of `params` on a split.

    Evaluation windows do not overlap, even if training windows do: each token is counted at most once, and the standard
    error assumes independent windows. A `data.stride` above T applies: it can align windows with documents of equal length.

    Args:
        program: the compiled functions.
        params: trained parameters or their EMA, on their devices.
        tokens: the split to evaluate.
        watch: the state of the run; before the last evaluation, `train.eval_windows` are evaluated instead of all windows.

    Raises:
        UserError: if the split has no window, or all targets are masked in the windows common to all evaluations of a run.
    """
    began = time.perf_counter()
    config = program.config
    T = config.window
    starts = np.asarray(tokens.eval_starts(T, max(config.data.stride, T)))
    if not len(starts):
        raise UserError(f"the split has no window to evaluate: it has {len(tokens):,} tokens; use a longer text")
    shared = evenly_spaced(len(starts), config.train.eval_windows)
    windows = np.arange(len(starts)) if watch.final else shared
    rows = Windows(tokens, starts[windows], T)

    # The batch size depends on the whole split, not on `windows`, so that all evaluations of a run compile one shape.
    ways = batch_ways(program.mesh)
    batch_size = config.train.eval_batch_size or program.microbatches.rows
    batch_size = math.ceil(min(batch_size, len(starts)) / ways) * ways
    sums = _sums_of_rows(program, params, rows, batch_size, watch)
    if sums is None:
        return None

    count_B = np.asarray(sums.count_B)
    result = summarize(np.asarray(sums.loss_B), count_B, np.searchsorted(windows, shared))
    count = float(count_B.sum(dtype=np.float64))
    others = {name: float(np.sum(value_B, dtype=np.float64)) / count for name, value_B in sums.others.items()}
    return result._replace(seconds=time.perf_counter() - began, others=others, rows=rows)


def _sums_of_rows(program: Program, params: Any, rows: Windows, batch_size: int, watch: Watch) -> RowSums | None:
    """Return the sums of the objective of each row, on the host, or None if interrupted."""
    watch.progress(0, len(rows))

    def batch(first: int) -> Any:
        part = replace(rows, starts_B=rows.starts_B[first : first + batch_size])
        return put(program.mesh, [part], batch_size)

    parts: list[RowSums] = []
    with prefetched(batch, range(0, len(rows), batch_size)) as batches:
        for _, ready in batches:
            watch.wait(ready)
            if watch.interrupted():
                return None
            parts.append(program.sums(params, ready.result()))
            if len(parts) > AHEAD:  # limit on the number of queued batches
                jax.block_until_ready(parts[-AHEAD - 1])
                watch.progress((len(parts) - AHEAD) * batch_size, len(rows))

    # Drop the rows that pad the last batch.
    joined: RowSums = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(rows)], *jax.device_get(parts))
    return joined


def evenly_spaced(n: int, count: int) -> np.ndarray:
    """Return up to `count` (0: all) of the indices of n windows, evenly spaced, ascending."""
    count = min(count or n, n)
    return np.arange(count) * n // max(count, 1)


def summarize(sums: np.ndarray, counts: np.ndarray, shared: np.ndarray | slice = slice(None)) -> Evaluation:
    """Compute the mean loss over all tokens, and its standard error.

    `stderr = std(sums - loss * counts) / mean(counts) / sqrt(windows)`; for equal counts, `std(window means) / sqrt(windows)`.
    `sums` and `counts` are the summed loss and the number of tokens of each window, and `shared` the indices for `ranking`.

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


def loss_difference(before: Evaluation, after: Evaluation) -> tuple[float, float]:
    """Compute `after.loss - before.loss` of two evaluations on the same windows, and its standard error.

    The differences per window vary much less than the losses: both evaluations have the same hard and easy windows.
    """
    return after.loss - before.loss, _stderr(after.deviations - before.deviations)


def _stderr(deviations: np.ndarray) -> float:
    """Compute the standard error of a mean, `std / sqrt(n)`; NaN for a single number."""
    n = len(deviations)
    if n <= 1:
        return math.nan
    return float(deviations.std(ddof=1) / math.sqrt(n))
