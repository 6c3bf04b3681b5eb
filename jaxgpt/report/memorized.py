"""Find the longest span of a text that occurs verbatim in a corpus, such as the training data.

The ids of the corpus are read once, in blocks: memory depends only on the sizes of a block and of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.data import Split, Tokens
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.report.blocks import blocks
from jaxgpt.report.hashes import Grams, HashSet

SEARCHED = 1 << 18  # minimum number of ids to search at a time; the hashes of these ids fit in the CPU's cache


class Match(NamedTuple):
    """A span that a sample shares with a corpus, at its first occurrence in the corpus."""

    length: int  # in tokens
    start: int  # index in the sample
    position: int  # index in the corpus


def longest_matches(samples: Sequence[ArrayLike], corpus: Any, progress: Progress = NO_PROGRESS) -> list[Match]:
    """Find the longest span of each sample that occurs in a corpus, in one pass over the corpus.

    A match longer than a sample's current match contains an n-gram one token longer than the shortest current match.
    Each block is searched for the hashes of the samples' n-grams of this length; longer n-grams are tried only after a hit.
    Equal hashes are verified token by token, so the result is exact.

    Args:
        samples: rows of token ids.
        corpus: token ids, one-dimensional, such as a memory-mapped array, or a `Split`; read once, in blocks.
        progress: called with the number of ids read so far and the total.

    Returns:
        A match for each sample; its length is 0 if no id of the sample occurs.

    Raises:
        UserError: if a sample is not a one-dimensional array of integers, or an id of the corpus is invalid.
    """
    rows = [Grams(_row(sample)) for sample in samples]
    is_array = hasattr(corpus, "__array__")  # an array of NumPy or JAX
    split: Split = Tokens([np.asarray(corpus)]) if is_array else corpus
    best = [Match(0, 0, 0)] * len(rows)
    longest = max(map(len, rows), default=0)
    size = max(SEARCHED, 4 * longest)
    n = 0  # length of the n-grams whose hashes are in `wanted`
    wanted = HashSet(np.zeros(0, np.uint64))
    # Blocks overlap: a match across the end of a block is complete in the next block.
    for number, ids in enumerate(blocks(split, size, progress, following=longest - 1)):
        open_rows = [i for i, row in enumerate(rows) if best[i].length < len(row)]
        if not open_rows:
            break

        longer = min(best[i].length for i in open_rows) + 1
        if longer != n:
            n = longer
            wanted = HashSet(np.concatenate([rows[i].of(n) for i in open_rows]))

        block = Grams(ids)
        _, ranks = wanted.find(block.of(n))
        if not len(ranks):
            continue
        hits = wanted.hashes[np.unique(ranks)]
        for i in open_rows:
            if np.isin(rows[i].of(n), hits).any():
                best[i] = _improve(best[i], rows[i], block, number * size)
    return best


def _improve(best: Match, sample: Grams, block: Grams, begin: int) -> Match:
    """Return the longest match in the block at `begin` in the corpus, or `best` if no match is longer."""
    while True:
        found = _find(best.length + 1, sample, block)
        if found is None:
            return best
        start, position = found
        n = min(len(sample) - start, len(block) - position)
        differ = np.flatnonzero(sample.ids[start : start + n] != block.ids[position : position + n])
        length = int(differ[0]) if len(differ) else n
        best = Match(length, start, begin + position)


def _find(n: int, sample: Grams, block: Grams) -> tuple[int, int] | None:
    """Find the first n-gram of a block that a sample contains; return its start in the sample and block."""
    grams, starts = np.unique(sample.of(n), return_index=True)
    positions, ranks = HashSet(grams).find(block.of(n))
    for position, rank in zip(positions, ranks, strict=True):
        start = int(starts[rank])
        if np.array_equal(sample.ids[start : start + n], block.ids[position : position + n]):
            return start, int(position)
    return None


def _row(ids: ArrayLike) -> np.ndarray:
    row = np.asarray(ids)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "iu"):
        raise UserError(f"a sample must be a row of token ids, not {row.dtype} {list(row.shape)}")
    return row.astype(np.int64)
