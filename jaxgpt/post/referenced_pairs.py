"""Preference pairs with their log probabilities under the reference, as a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxgpt.data import Split
from jaxgpt.post.preference import PairBatch


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

    def windows(self, starts_B: np.ndarray, block_size: int) -> PairBatch:
        """Read rows with the log probabilities of the reference."""
        places = np.searchsorted(self.starts_N, starts_B)
        ends = np.searchsorted(self.starts_N, starts_B, side="right")
        assert np.all(places < ends), "a pair without log probabilities"
        return {"windows": self.pairs.windows(starts_B, block_size), "reference_log_p": self.log_p_N2[places]}


def without_log_p(pairs: Split) -> ReferencedPairs:
    """Return a split of pairs without log probabilities, for the shapes of batches (`parallel.rows.row_spec`)."""
    return ReferencedPairs(pairs, starts_N=np.zeros(0, np.int64), log_p_N2=np.zeros((0, 2), np.float32))
