"""The log probabilities of preference pairs under the reference, computed in microbatches before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxgpt.data import Split, Windows
from jaxgpt.parallel.processes import Poll
from jaxgpt.post.preference import pair_log_p
from jaxgpt.post.referenced_pairs import ReferencedPairs
from jaxgpt.progress import Progress
from jaxgpt.signals import is_stop_requested
from jaxgpt.trainer.program import Program


class MicrobatchLogP:
    """Computes the log probabilities of pairs under the reference in microbatches, until a signal requests a stop.

    Args:
        program: program of the run.
        weights: weights of the reference, on the devices.
        total: number of pairs of all calls of `compute`.
        progress: called with the number of computed pairs and the total, before the first and after each microbatch.
    """

    def __init__(self, program: Program, weights: Any, total: int, progress: Progress) -> None:
        self._program = program
        self._weights = weights
        self._total = total
        self._progress = progress
        self._computed = 0  # number of pairs computed by all calls
        self._poll = Poll(program.mesh, lag=0)
        self._log_p = partial(reference_log_p, program.model.apply, program.config.train.loss_chunk)

    def compute(self, pairs: Split, microbatches: Sequence[np.ndarray]) -> ReferencedPairs | None:
        """Compute the log probabilities of the pairs at these starts of rows; return None in all processes if stopped."""
        # Both lists begin with an empty array, because `concatenate` needs an array.
        starts_of_all = [np.zeros(0, np.int64)]
        log_p_of_all = [np.zeros((0, 2), np.float32)]
        self._progress(self._computed, self._total)
        for starts in microbatches:
            if self._poll.ask(is_stop_requested()):
                return None
            starts_of_all.append(starts)
            log_p_of_all.append(self._microbatch(pairs, starts))
            self._computed += len(starts)
            self._progress(self._computed, self._total)

        starts_N = np.concatenate(starts_of_all)
        log_p_N2 = np.concatenate(log_p_of_all)
        ascending = np.argsort(starts_N)
        return ReferencedPairs(pairs, starts_N[ascending], log_p_N2[ascending])

    def _microbatch(self, pairs: Split, starts: np.ndarray) -> np.ndarray:
        """Compute the log probabilities of one microbatch of n pairs, float32 `[n, 2]`."""
        n = len(starts)
        # Repeat the last pair, so that all microbatches have the same shape.
        padding = np.repeat(starts[-1:], self._program.batches.microbatches.rows - n)
        windows = Windows(pairs, np.concatenate([starts, padding]), self._program.config.window)
        log_p_B2 = self._program.call(self._log_p, self._weights, windows)
        return np.asarray(log_p_B2, np.float32)[:n]


def reference_log_p(apply_fn: Callable[..., Any], chunk: int, weights: Any, windows_B2T3: jax.Array) -> jax.Array:
    """Compute the log probabilities of both answers of each pair, float32 `[B, 2]`; arguments as for `pair_log_p`."""
    return pair_log_p(apply_fn, weights, windows_B2T3, chunk=chunk).log_p_B2
