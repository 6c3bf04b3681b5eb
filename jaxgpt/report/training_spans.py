"""The longest spans of generated texts in the training data of a run, with their texts and locations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from jaxgpt.data import Data, Mixture
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.report.memorized import Match, longest_matches

CONTEXT = 40  # maximum number of tokens to show before and after a span
PIECES = 8  # number of pieces of the validation text, for comparison


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
