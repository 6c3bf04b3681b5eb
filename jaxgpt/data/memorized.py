"""Find the longest span of a generated text that occurs verbatim in the training data.

The training ids are read once, in blocks, and may be memory-mapped: memory is bounded by a block and the samples. An index
of the training ids, such as a suffix array, would take several bytes per token and minutes to build, for a few short queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import Config, DataConfig, UserError
from jaxgpt.data import Dataset, Mixture, Packed, Tokens
from jaxgpt.data.corpus import Progress, Text, no_progress, read_text
from jaxgpt.data.statistics import MIX, mix
from jaxgpt.data.tokens import is_token_path

BLOCK = 1 << 18  # ids to search at once: their hashes fit in the CPU's cache
SPREAD = 8  # entries of a table per n-gram, so that few others fall on a used entry
CONTEXT = 40  # tokens to show before and after a span
PIECES = 8  # of the validation text, to compare with


class Match(NamedTuple):
    """A span that a sample shares with a corpus.

    Attributes:
        length: number of tokens.
        start: index of its first token in the sample.
        place: index of its first token in the corpus, the first place if there are several.
    """

    length: int
    start: int
    place: int


@dataclass(frozen=True)
class Span:
    """The longest span of a sample that occurs in the training data.

    Attributes:
        tokens: its length in tokens; 0 if no token of the sample occurs.
        of: length of the sample in tokens.
        characters: its length in characters.
        text: its text.
        start: index of its first token in the sample.
        token: index of its first token in the training ids.
        place: the file and line of a text, the file and token of token files, or the number of the conversation.
        before: the text before it in the training data.
        after: the text after it.
    """

    tokens: int
    of: int
    characters: int
    text: str
    start: int
    token: int
    place: str
    before: str
    after: str


def longest_match(sample_ids: ArrayLike, corpus: Any) -> Match:
    """Find the longest run of consecutive ids of a sample that occurs in a corpus.

    Args:
        sample_ids: a row of token ids.
        corpus: a row of token ids, such as a memory-mapped array, or an object with a length and a method `take(start, n)`.
            It is read once, in blocks.

    Returns:
        The match; its length is 0 if no id of the sample occurs.

    Raises:
        UserError: the sample is not a row of integers.
    """
    return longest_matches([sample_ids], corpus)[0]


def longest_matches(samples: Sequence[ArrayLike], corpus: Any, progress: Progress = no_progress) -> list[Match]:
    """Find the longest match of each of several samples in one pass over a corpus. See `longest_match`.

    A match that is longer than those found so far contains an n-gram one token longer than the shortest of them. Each block is
    searched for such n-grams of all samples at once, by their hashes; only where one occurs, longer ones are tried. Equal
    hashes are compared token by token, so the result is exact.
    """
    rows = [_Hashes(_row(sample)) for sample in samples]
    take: Callable[[int, int], np.ndarray] = lambda start, n: np.asarray(corpus[start : start + n])  # noqa: E731
    if not hasattr(corpus, "__array__") and hasattr(corpus, "take"):
        take = corpus.take
    best = [Match(0, 0, 0)] * len(rows)
    longest, total = max(map(len, rows), default=0), len(corpus)
    block = max(BLOCK, 4 * longest)
    n, table = 0, _Table(np.zeros(0, np.uint64))
    for begin in range(0, total, block):
        left = [i for i, row in enumerate(rows) if best[i].length < len(row)]
        if not left:
            break
        # Blocks overlap, so that a match across the end of one is whole in the next.
        found = _Hashes(take(begin, min(block + longest - 1, total - begin)))
        if (longer := min(best[i].length for i in left) + 1) != n:
            n, table = longer, _Table(np.concatenate([rows[i].of(longer) for i in left]))
        hashes = found.of(n)
        if len(hits := np.unique(hashes[table.places(hashes)])):
            for i in left:
                if np.isin(rows[i].of(n), hits).any():
                    best[i] = _improve(best[i], rows[i], found, begin)
        progress(min(begin + block, total), total)
    return best


def find_memorized(
    samples: Sequence[Sequence[int]], config: Config, data: Dataset, progress: Progress = no_progress
) -> tuple[list[Span], float | None]:
    """Find the longest span of each sample in the training data of a run.

    Args:
        samples: ids of generated texts.
        config: of the run.
        data: of the run.
        progress: called with the number of tokens searched so far and the total.

    Returns:
        The spans; and, to compare them with, the median length in tokens of the longest spans of `PIECES` pieces of the
        validation text that are as long as the longest sample. None if nothing was held out, or too little.
    """
    n, pieces = max(map(len, samples), default=0), list[np.ndarray]()
    if data.held_out and 0 < n <= len(data.val):
        pieces = [data.val.take(int(start), n) for start in np.linspace(0, len(data.val) - n, PIECES)]
    matches = longest_matches([*samples, *pieces], data.train, progress)
    text_of = cache(_text)
    spans = [_span(ids, match, config, data, text_of) for ids, match in zip(samples, matches, strict=False)]
    return spans, float(median(match.length for match in matches[len(samples) :])) if pieces else None


class _Hashes:
    """64-bit hashes of the n-grams of a row of ids, for any n."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self._powers = [mix(ids.astype(np.int64).view(np.uint64) + np.uint64(1))]  # of the n-grams for n = 1, 2, 4, ...

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, n: int) -> np.ndarray:
        """Return the hash of the n-gram at each id but the last n - 1, from those of its first and last 2^k ids."""
        power = n.bit_length() - 1
        while len(self._powers) <= power:
            self._powers.append(self._joined(len(self._powers) - 1, 1 << (len(self._powers) - 1)))
        return self._powers[power] if n == 1 << power else self._joined(power, n - (1 << power))

    def _joined(self, power: int, apart: int) -> np.ndarray:
        hashes = self._powers[power]
        factor = np.uint64((MIX[0] * (2 * power + 1)) & (2**64 - 1))  # a different odd number for each power
        joined: np.ndarray = hashes[: max(len(hashes) - apart, 0)] * factor + hashes[apart:]
        return joined


def _improve(best: Match, sample: _Hashes, block: _Hashes, begin: int) -> Match:
    """Return the longest match in a block that begins at id number `begin`, or `best` if it is at least as long."""
    low, high = best.length, best.length + 1
    while high <= len(sample) and (match := _find(high, sample, block, begin)):
        low, high, best = high, 2 * high, match
    high = min(high, len(sample) + 1)
    while high - low > 1:  # there is a match of length `low`, none of length `high`
        middle = (low + high) // 2
        if match := _find(middle, sample, block, begin):
            low, best = middle, match
        else:
            high = middle
    return best


def _find(n: int, sample: _Hashes, block: _Hashes, begin: int) -> Match | None:
    """Return the first n-gram of a block that occurs in a sample; None if there is none."""
    wanted, starts = np.unique(sample.of(n), return_index=True)
    hashes = block.of(n)
    for place in _Table(wanted).places(hashes).tolist():
        start = int(starts[np.searchsorted(wanted, hashes[place])])
        if np.array_equal(sample.ids[start : start + n], block.ids[place : place + n]):
            return Match(n, start, begin + place)
    return None


class _Table:
    """A set of hashes. A table of their first bits excludes most others at once."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = np.unique(hashes)
        bits = (SPREAD * len(self.hashes)).bit_length()
        self.shift = np.uint64(64 - max(bits, 1))
        self.used = np.zeros(1 << max(bits, 1), bool)
        self.used[self.hashes >> self.shift] = True

    def places(self, hashes: np.ndarray) -> np.ndarray:
        """Return the indices of the hashes that are in the set, in ascending order."""
        places = np.flatnonzero(self.used[hashes >> self.shift])
        rank = np.minimum(np.searchsorted(self.hashes, hashes[places]), len(self.hashes) - 1)
        same: np.ndarray = places[self.hashes[rank] == hashes[places]]
        return same


def _row(ids: ArrayLike) -> np.ndarray:
    row = np.asarray(ids)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "iu"):
        raise UserError(f"a sample must be a row of token ids, not {row.dtype} {list(row.shape)}")
    return row.astype(np.int64)


def _text(data: DataConfig) -> Text | None:
    """Read the text of a config; None for token files and conversations."""
    is_text = not (data.conversations or (data.path and is_token_path(Path(data.path))))
    return read_text(data) if is_text else None


def _span(
    ids: Sequence[int], match: Match, config: Config, data: Dataset, text_of: Callable[[DataConfig], Text | None]
) -> Span:
    n, start, place = match
    if not n:
        return Span(0, len(ids), 0, "", 0, 0, "", "", "")
    span, before, after = (
        data.tokenizer.decode(part)
        for part in (
            ids[start : start + n],
            data.train.take(max(place - CONTEXT, 0), min(CONTEXT, place)),
            data.train.take(place + n, min(CONTEXT, len(data.train) - place - n)),
        )
    )
    source, train, within = config.data, data.train, place
    if isinstance(train, Mixture):
        index, within, _ = next(train.parts(place, 1))
        source, train = source.sources[index][0], train.sources[index]
    text = text_of(source)
    where = (_line(span, text, source) if text else _part(within, train)) or f"training token {place:,}"
    return Span(n, len(ids), len(span), span, start, place, where, before, after)


def _line(span: str, text: Text, data: DataConfig) -> str:
    """Return the file and line where a span first occurs in a text; "" if the tokenizer does not preserve the text."""
    wanted = span.strip("\ufffd").encode()  # ids of bytes may begin and end within a character
    place = text.data.find(wanted) if wanted else -1
    if place < 0:
        return ""
    name, begin = data.path or data.dataset, 0
    for file, size in text.files:
        name = file
        if place < begin + size:
            break
        begin += size
    return f"{name}:{text.data[begin:place].count(10) + 1}"


def _part(place: int, train: Tokens | Packed) -> str:
    """Return the token file and the index of a token in it, or the number of its conversation; "" if it has neither."""
    if isinstance(train, Packed) and train.trained is not None:
        return f"conversation {int((train.begins <= place).sum()):,} of the training data"
    for part in train.tokens.parts if isinstance(train, Packed) else train.parts:
        if place < len(part):
            name = getattr(part, "filename", None)
            return f"{name}, token {place:,}" if name else ""
        place -= len(part)
    return ""
