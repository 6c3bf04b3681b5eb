"""The default evaluator: the loss on a split, or on evenly spaced windows of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxgpt.data import Split, Windows
from jaxgpt.errors import UserError
from jaxgpt.parallel.rows import batch_ways, put
from jaxgpt.train.loss import RowSums
from jaxgpt.trainer.evaluators import NO_RUN, Watch
from jaxgpt.trainer.mean_loss import Evaluation, summarize
from jaxgpt.trainer.prefetch import prefetched
from jaxgpt.trainer.program import Program

AHEAD = 2  # number of later batches dispatched before blocking on a batch


@dataclass(frozen=True)
class ValidationLoss:
    """The default evaluator of a run: the loss on a split. Evaluations before the last use `train.eval_windows` windows.

    Attributes:
        split: the split to evaluate; None: the validation split of the run.
    """

    split: Split | None = None

    @property
    def ranks_by(self) -> str:
        """Name of the ranking: the loss on the validation split of the run, or on a different split."""
        return "loss" if self.split is None else "loss on a split given in Python"

    def __call__(self, program: Program, params: Any, watch: Watch) -> Evaluation | None:
        """Return the loss of `params` on the split, or None if interrupted."""
        split = self.split
        if split is None:
            assert watch.data is not None, "the data of the run"
            split = watch.data.val
        return evaluate(program, params, split, watch)


def evaluate(program: Program, params: Any, split: Split, watch: Watch = NO_RUN) -> Evaluation | None:
    """Compute the loss of `params` on a split; return None if interrupted.

    Evaluation windows do not overlap, even if training windows do: each token is counted at most once, and the standard
    error assumes independent windows. A `data.stride` above T is kept: it can align windows with documents of equal length.

    Args:
        program: the compiled functions.
        params: trained parameters or their EMA, on their devices.
        split: the split to evaluate.
        watch: the state of the run: the last evaluation uses all windows, other evaluations use at most
            `train.eval_windows` windows (0: all).

    Raises:
        UserError: if the split has no window, or all targets are masked in the windows common to all evaluations of a run.
    """
    began = time.perf_counter()
    config = program.config
    T = config.window
    starts = np.asarray(split.eval_starts(T, max(config.data.stride, T)))
    if not len(starts):
        raise UserError(f"the split has no window to evaluate: it has {len(split):,} tokens; use a longer text")

    # Choose windows by index: `shared` is common to all evaluations of the run, and `chosen` is for this evaluation.
    shared = evenly_spaced(len(starts), config.train.eval_windows)
    chosen = np.arange(len(starts)) if watch.final else shared
    rows = Windows(split, starts[chosen], T)

    # The batch size depends on the whole split, not on `chosen`, so that all evaluations of a run use one compiled program.
    ways = batch_ways(program.mesh)
    batch_size = config.train.eval_batch_size or program.batches.microbatches.rows
    batch_size = math.ceil(min(batch_size, len(starts)) / ways) * ways
    sums = _sums_of_rows(program, params, rows, batch_size, watch)
    if sums is None:
        return None

    count_B = np.asarray(sums.count_B)
    shared_rows = np.searchsorted(chosen, shared)  # the rows of `sums` with the shared windows
    result = summarize(np.asarray(sums.loss_B), count_B, shared_rows)
    count = float(count_B.sum(dtype=np.float64))
    others = {name: float(np.sum(value_B, dtype=np.float64)) / count for name, value_B in sums.others.items()}
    return result._replace(seconds=time.perf_counter() - began, others=others, rows=rows)


def _sums_of_rows(program: Program, params: Any, rows: Windows, batch_size: int, watch: Watch) -> RowSums | None:
    """Return the sums of the objective of each row, on the host, or None if interrupted."""
    watch.progress(0, len(rows))

    def batch(first: int) -> Any:
        part = replace(rows, starts_B=rows.starts_B[first : first + batch_size])
        return put(program.mesh, part, batch_size)

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
    watch.progress(len(rows), len(rows))
    return joined


def evenly_spaced(n: int, count: int) -> np.ndarray:
    """Return up to `count` (0: all) of the indices of n windows, evenly spaced, ascending."""
    count = min(count or n, n)
    return np.arange(count) * n // max(count, 1)
