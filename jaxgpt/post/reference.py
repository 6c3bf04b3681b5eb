"""Preference pairs with their log probabilities under the reference, computed in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data import Split, Windows
from jaxgpt.parallel.processes import Poll
from jaxgpt.post.preference import pair_log_p
from jaxgpt.progress import Progress
from jaxgpt.signals import is_stop_requested
from jaxgpt.trainer.program import Program


def computes_reference_once(config: Config) -> bool:
    """Return whether the reference of pairs is computed once per pair, before training (`post.reference_log_p`)."""
    post = config.post
    if not (post.is_preference and post.has_reference):
        return False
    if post.reference_log_p == "auto":
        return not config.lora.rank
    return post.reference_log_p == "once"


@dataclass(frozen=True)
class ReferencedPairs:
    """Preference pairs with the log probabilities of their answers under the reference, as a split.

    Attributes:
        pairs: the split of preference pairs.
        starts_N: starts of the rows with log probabilities, ascending.
        log_p_N2: log probabilities of the chosen and the rejected answer, float32.
    """

    pairs: Split
    starts_N: np.ndarray
    log_p_N2: np.ndarray
    has_documents: ClassVar[bool] = True
    indexed: ClassVar[bool] = True

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.pairs)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of n ids from index `start`, int32."""
        return self.pairs.take(start, n)

    def window_count(self, block_size: int) -> int:
        """Count the rows."""
        return self.pairs.window_count(block_size)

    def eval_starts(self, block_size: int, stride: int) -> Sequence[int] | np.ndarray:
        """Return the starts of the evaluated rows."""
        return self.pairs.eval_starts(block_size, stride)

    def windows(self, starts_B: np.ndarray, block_size: int) -> dict[str, np.ndarray]:
        """Read rows of `post.preference.preference_objective`: `windows` `[B, 2, T, 3]` and `reference_log_p` `[B, 2]`."""
        places = np.searchsorted(self.starts_N, starts_B)
        assert np.array_equal(self.starts_N[places], starts_B), "a pair without log probabilities"
        return {"windows": self.pairs.windows(starts_B, block_size), "reference_log_p": self.log_p_N2[places]}


def no_pairs(split: Split) -> ReferencedPairs:
    """Return a split of pairs without log probabilities, from which `row_spec` takes the shapes of batches."""
    return ReferencedPairs(split, np.zeros(0, np.int64), np.zeros((0, 2), np.float32))


class MicrobatchLogP:
    """Computes the log probabilities of pairs under the reference in microbatches, until a signal requests a stop.

    Args:
        program: program of the run.
        weights: weights of the reference, on the devices.
        total: number of pairs of all calls.
        progress: called with the number of computed pairs and the total.
    """

    def __init__(self, program: Program, weights: Any, total: int, progress: Progress) -> None:
        self._program = program
        self._weights = weights
        self._total = total
        self._progress = progress
        self._computed = 0
        self._poll = Poll(program.mesh, lag=0)
        self._is_stopped = False
        self._log_p = partial(reference_log_p, program.model.apply, program.config.train.loss_chunk)

    def __call__(self, pairs: Split, microbatches: Sequence[np.ndarray]) -> ReferencedPairs | None:
        """Compute the log probabilities of the pairs at these starts of rows; return None in all processes if stopped."""
        rows = self._program.microbatches.rows
        log_p = [np.zeros((0, 2), np.float32)]
        for starts in microbatches:
            self._is_stopped = self._is_stopped or bool(self._poll.ask(is_stop_requested()))
            if self._is_stopped:
                return None
            self._progress(self._computed, self._total)
            # Repeat the last pair, so that all microbatches have the same shape.
            full = starts[np.minimum(np.arange(rows), len(starts) - 1)]
            windows = Windows(pairs, full, self._program.config.window)
            log_p_B2 = self._program.call(self._log_p, self._weights, windows)
            log_p.append(np.asarray(log_p_B2)[: len(starts)])
            self._computed += len(starts)
        starts_N = np.concatenate([np.zeros(0, np.int64), *microbatches])
        ascending = np.argsort(starts_N)
        return ReferencedPairs(pairs, starts_N[ascending], np.concatenate(log_p)[ascending])


def reference_log_p(apply_fn: Callable[..., Any], chunk: int, weights: Any, windows_B2T3: jax.Array) -> jax.Array:
    """Compute the log probabilities of both answers of each pair, float32 `[B, 2]`; arguments as for `pair_log_p`."""
    return pair_log_p(apply_fn, weights, windows_B2T3, chunk=chunk).log_p_B2


def microbatches_of(starts: np.ndarray, rows: int) -> list[np.ndarray]:
    """Divide starts into microbatches of `rows`; the last one may be smaller."""
    return [starts[first : first + rows] for first in range(0, len(starts), rows)]
