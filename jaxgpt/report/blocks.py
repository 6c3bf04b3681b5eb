"""Blocks of the ids of a split: all of them in order, or a sample."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxgpt.data import Split
from jaxgpt.progress import Progress

SAMPLED = 1 << 20  # tokens per block of a sample


def blocks(split: Split, size: int, progress: Progress, following: int = 0) -> Iterator[np.ndarray]:
    """Yield the ids of a split in blocks of `size`, each with up to `following` ids of the next block."""
    total = len(split)
    for start in range(0, total, size):
        yield split.take(start, min(size + following, total - start))
        progress(min(start + size, total), total)


def sample(length: int, limit: int) -> list[tuple[int, int]]:
    """Return start and length of evenly spaced blocks that cover at most `limit` of `length` tokens.

    `limit` is at least `SAMPLED`, the length of a block, unless it is at least `length`.
    """
    if length <= limit:
        return [(0, length)]
    assert limit >= SAMPLED
    starts = np.linspace(0, length - SAMPLED, limit // SAMPLED)
    return [(int(start), SAMPLED) for start in starts]
