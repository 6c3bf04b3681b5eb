"""Mixture of several sources of windows in fixed shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxgpt.data.tokens import Split


class Mixture:
    """Sources of windows, each with a weight.

    The ids of the sources are concatenated: the window start s of source i becomes `offsets[i] + s`.

    Attributes:
        sources: splits, either all or none with document ids.
        weights: positive integers; source i has the share `weights[i] / sum(weights)` of the training windows.
        offsets: index of the first id of each source, and the total number of ids.
    """

    def __init__(self, sources: Sequence[Split], weights: Sequence[int]) -> None:
        self.sources, self.weights = sources, weights
        self.offsets = list(itertools.accumulate(map(len, sources), initial=0))
        self.has_documents = sources[0].has_documents
        self.indexed = False

    def __len__(self) -> int:
        return self.offsets[-1]

    def source_of_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Assign rows of batches to the sources; `rows` are indices among all rows of a run.

        For shares a, b and c, the first n rows contain `round(n * a)` rows of the first source. The second source provides
        `round(m * b / (b + c))` of the m remaining rows, and so on. The source of a row follows from its index,
        without iterating over earlier rows. Each number of rows differs from the exact share by at most half a row per source.

        Returns:
            The index of the source of each row, and the number of earlier rows of that source.
        """
        source, before = np.full(len(rows), len(self.weights) - 1), rows.copy()
        left, total = np.arange(len(rows)), sum(self.weights)
        for index, weight in enumerate(self.weights[:-1]):
            count, after = ((n * weight + total // 2) // total for n in (before[left], before[left] + 1))
            taken = after > count
            source[left[taken]] = index
            before[left] = np.where(taken, count, before[left] - count)
            left, total = left[~taken], total - weight
        return source, before

    def parts(self, start: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of the n ids from index `start`: source index, index within the source, length."""
        for index, (first, end) in enumerate(itertools.pairwise(self.offsets)):
            begin = max(start, first)
            if begin < min(start + n, end):
                yield index, begin - first, min(start + n, end) - begin

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the n ids from index `start`, int32."""
        parts = [self.sources[index].take(first, count) for index, first, count in self.parts(start, n)]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def starts(self, block_size: int) -> int:
        """Count the possible starts of complete windows."""
        return sum(source.starts(block_size) for source in self.sources)

    def eval_starts(self, block_size: int, stride: int) -> np.ndarray:
        """Return the starts of the evaluation windows of all sources, in the order of the sources."""
        pairs = zip(self.sources, self.offsets, strict=False)
        return np.concatenate([np.asarray(each.eval_starts(block_size, stride)) + first for each, first in pairs])

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts`, int32 `[B, T + 1]`, or `[B, T, 3]` with document ids."""
        source = np.searchsorted(self.offsets, starts, side="right") - 1
        out = np.empty((len(starts), *((block_size, 3) if self.has_documents else (block_size + 1,))), np.int32)
        for index in np.unique(source).tolist():
            own = source == index
            out[own] = self.sources[index].windows(starts[own] - self.offsets[index], block_size)
        return out
