"""Mixture of several sources of windows, in shares that may change during a run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxgpt.data.tokens import Split
from jaxgpt.errors import UserError

Rows = TypeVar("Rows", int, np.ndarray)
NOT_OPEN = -1  # index of a source that is not among the open sources


class Shares(NamedTuple):
    """A mixture: the weights of its sources, and the number of training tokens before it.

    Attributes:
        tokens: number of tokens in the training windows before the mixture.
        weights: positive integers, keyed by stream; a source has the share `weight / sum(weights)` of the windows.
    """

    tokens: int
    weights: Mapping[str, int]


class SourceRange(NamedTuple):
    """Consecutive ids of one source of a mixture."""

    source: int  # index of the source
    start: int  # index of the first id within the source
    length: int


class Mixture:
    """Sources of windows, in shares that may change during a run.

    The ids of the sources are concatenated: the window start s of source i becomes `offsets[i] + s`.

    Args:
        sources: splits, either all or none with document ids, keyed by the name of their random stream. The name determines
            the order of the windows of the source.
        schedule: mixtures in ascending order of tokens; the first begins at 0 tokens. Streams without a source are counted,
            but their windows cannot be read.

    Attributes:
        sources: the splits.
        streams: name of the random stream of each source.
        schedule: the mixtures.
        weights: weight of each source in the last mixture; 0: not used.
        offsets: index of the first id of each source, and the total number of ids.
        has_documents, indexed: as in `Split`.
    """

    def __init__(self, sources: Mapping[str, Split], schedule: Sequence[Shares]) -> None:
        self.streams = list(sources)
        self.sources = list(sources.values())
        self.schedule = schedule
        self.weights = [schedule[-1].weights.get(stream, 0) for stream in self.streams]
        self.offsets = list(itertools.accumulate(map(len, self.sources), initial=0))
        self.has_documents = self.sources[0].has_documents
        self.indexed = False

    @staticmethod
    def constant(sources: Sequence[Split], weights: Sequence[int]) -> Mixture:
        """Mix sources in constant shares; `weights` are positive integers."""
        by_stream = {f" of source {number}": source for number, source in enumerate(sources)}
        shares = Shares(0, dict(zip(by_stream, weights, strict=True)))
        return Mixture(by_stream, [shares])

    def __len__(self) -> int:
        return self.offsets[-1]

    def source_of_rows(self, rows: np.ndarray, row_tokens: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Assign rows of batches to the sources; `rows` are indices among all rows of a run.

        The source of a row follows from its index, without iterating over earlier rows (`divide`). A mixture begins with the
        first row after its number of tokens, and each source continues where the earlier mixtures ended.

        Args:
            rows: indices of rows, int64.
            row_tokens: tokens per row.

        Returns:
            The index of the source of each row, and the index of each row among all rows of its source.

        Raises:
            UserError: if a row belongs to a source that is not among `sources`.
        """
        source = np.empty(len(rows), np.int64)
        row_in_source = np.empty(len(rows), np.int64)
        earlier_rows: Counter[str] = Counter()  # rows of each stream in the earlier mixtures
        # Each mixture has the rows from its first row to the first row of the next mixture.
        firsts = [-(-shares.tokens // row_tokens) for shares in self.schedule]
        ends = [*firsts[1:], math.inf]
        for shares, first, end in zip(self.schedule, firsts, ends, strict=True):
            streams = list(shares.weights)
            weights = list(shares.weights.values())

            inside = (rows >= first) & (rows < end)
            number, row_in_mixture = divide(
                rows[inside] - first, weights
            )  # number: position of the stream in `streams`
            source[inside] = np.array([self._index(stream) for stream in streams])[number]
            row_in_source[inside] = np.array([earlier_rows[stream] for stream in streams])[number] + row_in_mixture

            # The next mixture continues after these rows.
            if end < math.inf:
                rows_of_streams = counts(int(end) - first, weights)
                earlier_rows.update(dict(zip(streams, rows_of_streams, strict=True)))
        if (source == NOT_OPEN).any():
            raise UserError(
                "a batch of an earlier mixture needs a source that is not open: open the data of all mixtures"
            )
        return source, row_in_source

    def _index(self, stream: str) -> int:
        """Return the index of the source of a stream, or `NOT_OPEN`."""
        return self.streams.index(stream) if stream in self.streams else NOT_OPEN

    def parts(self, start: int, n: int) -> Iterator[SourceRange]:
        """Yield the parts of the n ids from index `start`, one for each source that overlaps this range."""
        for index, (first, end) in enumerate(itertools.pairwise(self.offsets)):
            begin = max(start, first)
            if begin < min(start + n, end):
                yield SourceRange(index, begin - first, min(start + n, end) - begin)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the n ids from index `start`, int32."""
        parts = [self.sources[index].take(first, count) for index, first, count in self.parts(start, n)]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def window_count(self, block_size: int) -> int:
        """Count the complete windows of all sources."""
        return sum(source.window_count(block_size) for source in self.sources)

    def eval_starts(self, block_size: int, stride: int) -> np.ndarray:
        """Return the starts of the evaluation windows of all sources, in the order of the sources."""
        pairs = zip(self.sources, self.offsets, strict=False)  # the last offset is the total
        return np.concatenate([np.asarray(each.eval_starts(block_size, stride)) + first for each, first in pairs])

    def windows(self, starts_B: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts_B`, int32; all sources have windows of the same shape, such as `[B, T + 1]`."""
        source_B = np.searchsorted(self.offsets, starts_B, side="right") - 1
        no_rows = self.sources[0].windows(starts_B[:0], block_size)
        out = np.empty((len(starts_B), *no_rows.shape[1:]), np.int32)
        for index in np.unique(source_B).tolist():
            is_own_B = source_B == index
            out[is_own_B] = self.sources[index].windows(starts_B[is_own_B] - self.offsets[index], block_size)
        return out


def divide(rows: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows among sources in proportion to positive integer weights.

    For shares a, b and c, the first n rows contain `round(n * a)` rows of the first source. The second source provides
    `round(m * b / (b + c))` of the m remaining rows, and so on. Each number of rows differs from the exact share by at most
    half a row per source. For example, with equal weights, the rows 0, 1, 2, 3 have the sources 0, 1, 0, 1, and the indices
    0, 0, 1, 1 within them.

    Returns:
        The index of the source of each row, and the index of each row among the rows of its source.
    """
    source = np.full(len(rows), len(weights) - 1)  # the last source has all rows that no other source takes
    position = rows.copy()  # index of each row among the rows that no earlier source has taken
    left = np.arange(len(rows))  # where `rows` has rows that no source has taken yet
    total = sum(weights)
    for index, weight in enumerate(weights[:-1]):
        # A source takes the rows at which its rounded share grows; their position becomes the index among its rows.
        before = rounded_share(position[left], weight, total)
        after = rounded_share(position[left] + 1, weight, total)
        is_taken = after > before
        source[left[is_taken]] = index
        position[left] = np.where(is_taken, before, position[left] - before)
        left = left[~is_taken]
        total -= weight
    return source, position


def counts(n: int, weights: Sequence[int]) -> list[int]:
    """Count the rows of each source among the first n rows of `divide`."""
    numbers = []
    total = sum(weights)
    for weight in weights:
        count = rounded_share(n, weight, total)
        numbers.append(count)
        n -= count
        total -= weight
    return numbers


def rounded_share(n: Rows, weight: int, total: int) -> Rows:
    """Return `n * weight / total`, rounded to the nearest integer; half is rounded up."""
    return (n * weight + total // 2) // total
