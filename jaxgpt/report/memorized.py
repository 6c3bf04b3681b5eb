"""Find the longest span of a generated text that occurs verbatim in the training data.

The training ids are read once, in blocks: memory depends only on the sizes of a block and of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.data import Data, Mixture, Split, Tokens
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.report.hashes import Grams, HashSet, blocks

SEARCHED = 1 << 18  # minimum number of ids to search at a time; the hashes of these ids fit in the CPU's cache
CONTEXT = 40  # maximum number of tokens to show before and after a span
PIECES = 8  # number of pieces of the validation text, for comparison


class Match(NamedTuple):
    """A span that a sample shares with a corpus, at its first occurrence in the corpus."""

    length: int  # in tokens
    start: int  # index in the sample
    position: int  # index in the corpus


@dataclass(frozen=True)
class Memorized:
    """The longest span of a sample that occurs in the training data."""

    tokens: int  # length of the span in tokens; 0: no token of the sample occurs
    of: int  # length of the sample in tokens
    characters: int = 0  # length of the span in characters
    text: str = ""  # text of the span
    start: int = 0  # index of the span's first token in the sample
    token: int = 0  # index of the span's first token in the training ids
    location: str = ""  # file and line of the first occurrence in a text; otherwise path and token index
    before: str = ""  # text before the span in the training data
    after: str = ""  # text after the span


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
    split: Split = Tokens([np.asarray(corpus)]) if hasattr(corpus, "__array__") else corpus
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


class TrainingSpans(NamedTuple):
    """The longest spans of samples that also occur in the training data.

    Attributes:
        spans: the span of each sample.
        validation: for comparison, the median span length in tokens of `PIECES` pieces of the validation text, each as long as
            the longest sample; None: the samples are empty, or the held-out text is shorter than a piece.
    """

    spans: list[Memorized]
    validation: float | None


def find_memorized(samples: Sequence[Sequence[int]], data: Data, progress: Progress = NO_PROGRESS) -> TrainingSpans:
    """Find the longest span of each sample in the training data of a run."""
    n = max(map(len, samples), default=0)
    pieces: list[np.ndarray] = []
    if data.held_out and 0 < n <= len(data.val):
        starts = np.linspace(0, len(data.val) - n, PIECES)
        pieces = [data.val.take(int(start), n) for start in starts]

    matches = longest_matches([*samples, *pieces], data.train, progress)
    spans = [_memorized(ids, match, data) for ids, match in zip(samples, matches, strict=False)]
    if not pieces:
        return TrainingSpans(spans, None)
    lengths = [match.length for match in matches[len(samples) :]]
    return TrainingSpans(spans, float(median(lengths)))


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


def _memorized(ids: Sequence[int], match: Match, data: Data) -> Memorized:
    """Describe the longest span of a sample with the texts around it in the training data."""
    n, start, position = match
    if not n:
        return Memorized(0, len(ids))
    begin = max(position - CONTEXT, 0)
    end = position + n
    before = data.train.take(begin, position - begin)
    after = data.train.take(end, min(CONTEXT, len(data.train) - end))
    decode = data.tokenizer.decode
    span = decode(ids[start:][:n])

    # A source of a mixture has separate positions.
    part = data
    inside = position
    if isinstance(data.train, Mixture):
        index, inside, _ = next(data.train.parts(position, 1))
        part = data.parts[index]
    return Memorized(
        tokens=n,
        of=len(ids),
        characters=len(span),
        text=span,
        start=start,
        token=position,
        location=_line(span, part) or f"{part.name}, token {inside:,}",
        before=decode(before),
        after=decode(after),
    )


def _line(span: str, data: Data) -> str:
    """Return the file and line of the first occurrence of a span in a text, or "" if it does not occur."""
    wanted = span.strip("\ufffd").encode()  # without partial characters at the ends of a span of byte ids
    if data.text is None or not wanted or wanted not in data.text.data:
        return ""
    index = data.text.data.index(wanted)

    # The last file that begins at or before the span contains its start.
    name = data.name
    first = 0
    begin = 0
    for file, size in data.text.files:
        if index >= begin:
            name = file
            first = begin
        begin += size
    line = data.text.data[first:index].count(10) + 1
    return f"{name}:{line}"
