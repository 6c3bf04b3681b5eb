"""The longest spans of generated texts in the training data of a run, with their texts and locations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.data import Data
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.report.memorized import Match, longest_matches

CONTEXT = 40  # maximum number of tokens to show before and after a span
PIECES = 8  # number of pieces of the validation text, for comparison


@dataclass(frozen=True)
class Memorized:
    """The longest span of a sample that occurs in the training data. `jaxgpt sample --json` has the same fields."""

    tokens: int  # length of the span in tokens; 0: no token of the sample occurs
    of: int  # length of the sample in tokens
    characters: int = 0  # length of the span in characters
    text: str = ""  # text of the span
    start: int = 0  # index of the span's first token in the sample
    # Index of the span's first token in the training ids; the ids of a mixture's sources are concatenated.
    token: int = 0
    location: str = ""  # file and line of the first occurrence in a text; otherwise path and token index
    before: str = ""  # text before the span in its source
    after: str = ""  # text after the span in its source


class TrainingSpans(NamedTuple):
    """The longest spans of samples that also occur in the training data.

    Attributes:
        spans: the span of each sample.
        validation: for comparison, the median span length in tokens of `PIECES` pieces of the validation text, each as long as
            the longest sample; None: the samples are empty, or the held-out text is missing or shorter than a piece.
    """

    spans: list[Memorized]
    validation: float | None


def find_memorized(samples: Sequence[Sequence[int]], data: Data, progress: Progress = NO_PROGRESS) -> TrainingSpans:
    """Find the longest span of each sample in the training data of a run."""
    longest = max(map(len, samples), default=0)
    pieces: list[np.ndarray] = []
    if data.held_out and 0 < longest <= len(data.val):
        starts = np.linspace(0, len(data.val) - longest, PIECES)
        pieces = [data.val.take(int(start), longest) for start in starts]

    found = _search([*samples, *pieces], data, progress)
    spans = [_describe(ids, one) for ids, one in zip(samples, found, strict=False)]
    if not pieces:
        return TrainingSpans(spans, None)
    lengths = [one.match.length for one in found[len(samples) :]]
    return TrainingSpans(spans, float(median(lengths)))


class _SourceSpan(NamedTuple):
    """The longest span of a sample in a source.

    Attributes:
        match: the span; its position is an index in the training ids of the source.
        source: data of the source; for data without a mixture, all data.
        offset: index of the source's first id in the training ids of the data.
    """

    match: Match
    source: Data
    offset: int


def _search(samples: Sequence[ArrayLike], data: Data, progress: Progress) -> list[_SourceSpan]:
    """Find the longest span of each sample, in the first source that has it. No span crosses the end of a source."""
    by_source = []
    offset = 0
    for source in data.sources:
        matches = longest_matches(samples, source.train, progress)
        by_source.append([_SourceSpan(match, source, offset) for match in matches])
        offset += len(source.train)
    return [max(found, key=lambda one: one.match.length) for found in zip(*by_source, strict=True)]


def _describe(sample: Sequence[int], found: _SourceSpan) -> Memorized:
    """Describe the longest span of a sample, with the texts around it in its source."""
    match, source, offset = found
    if not match.length:
        return Memorized(tokens=0, of=len(sample))
    decode = source.tokenizer.decode
    text = decode(sample[match.start : match.start + match.length])

    train = source.train
    end = match.position + match.length
    first_before = max(match.position - CONTEXT, 0)
    before = train.take(first_before, match.position - first_before)
    after = train.take(end, min(CONTEXT, len(train) - end))
    return Memorized(
        tokens=match.length,
        of=len(sample),
        characters=len(text),
        text=text,
        start=match.start,
        token=offset + match.position,
        location=_line(text, source) or f"{source.name}, token {match.position:,}",
        before=decode(before),
        after=decode(after),
    )


def _line(span: str, source: Data) -> str:
    """Return the file and line of the first occurrence of a span in a text, or "" if it does not occur."""
    wanted = span.strip("\ufffd").encode()  # without partial characters at the ends of a span of byte ids
    if source.text is None or not wanted:
        return ""
    text = source.text.data
    start = text.find(wanted)
    if start < 0:
        return ""

    name = source.name
    begin_of_file = 0
    for file, size in source.text.files:
        if start < begin_of_file + size:
            name = file
            break
        begin_of_file += size
    line = text.count(b"\n", begin_of_file, start) + 1
    return f"{name}:{line}"
