"""The preference pairs that a run uses, as starts of rows: all held-out pairs, and the pairs of its training steps."""

from __future__ import annotations

import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config
from jaxgpt.data import Batches, Split


def held_out_starts(val: Split, config: Config) -> np.ndarray:
    """Return the starts of the rows of an evaluation of all held-out pairs, int64."""
    return np.asarray(val.eval_starts(config.window, max(config.data.stride, config.window)))


def used_microbatches(batches: Batches, config: Config, last: Info | None, rows: int) -> list[np.ndarray]:
    """Return the starts of the rows of training, in microbatches of `rows`.

    The microbatches have the pairs in the order of their first use since step 0, so that a resumed run has the same
    microbatches. If the run has changed its batch size, or its mixtures follow a schedule (`@TOKENS`), the order begins at
    the checkpoint. Microbatches that no step after the checkpoint uses are omitted.

    Args:
        batches: batches of the run.
        config: settings of the run.
        last: the checkpoint to continue from; None: a new run.
        rows: number of pairs of a microbatch.
    """
    step = last.step if last else 0
    end = config.train.steps
    has_changed = batches.first != 0 or len(config.data.phases) > 1
    order = first_uses(batches, range(step if has_changed else 0, end))
    later = first_uses(batches, range(step, end))
    return [starts for starts in microbatches_of(order, rows) if np.isin(starts, later).any()]


def first_uses(batches: Batches, steps: range) -> np.ndarray:
    """Return the starts of the rows of these steps, int64, in the order of their first use."""
    every = batches.split.window_count(batches.block_size)
    starts: dict[int, None] = {}
    for step in steps:
        starts.update(dict.fromkeys(batches.at(step).starts_B.tolist()))
        if len(starts) == every:
            break
    return np.array([*starts], np.int64)


def microbatches_of(starts: np.ndarray, rows: int) -> list[np.ndarray]:
    """Divide starts into microbatches of `rows`; the last one may be smaller."""
    return [starts[first : first + rows] for first in range(0, len(starts), rows)]
