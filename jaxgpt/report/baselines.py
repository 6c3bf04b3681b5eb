"""Baselines of a loss: cross entropies of n-gram models of the training tokens, and the size after gzip."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from jaxgpt.data import Data, Mixture, Packed, Split, Tokens
from jaxgpt.report import ngrams
from jaxgpt.report.ngrams import MAX_BASE, trigrams

COUNTED = 1 << 23  # training tokens to count n-grams in: up to 0.7 GB of memory
EVALUATED = 1 << 22  # held-out tokens to compute cross entropies on
QUICK = 1 << 22  # both of these when a run starts
SAMPLED = 1 << 20  # tokens of a block of a sample
COMPRESSED = 1 << 20  # bytes of held-out text to compress
GZIP_WINDOW = 1 << 15  # bytes that gzip looks back


def baselines(data: Data) -> dict[str, Any] | None:
    """Compute the baselines of a run's loss in a few seconds, on at most `QUICK` tokens of each split.

    Returns:
        A dictionary for JSON: `losses` of the uniform, unigram, bigram and trigram model in nats per token, and the numbers
        of tokens they were counted in and evaluated on. None for conversations and very short data.
    """
    size = data.tokenizer.vocab_size
    if any(part.is_conversations for part in data.parts or (data,)) or size > MAX_BASE:
        return None
    results = cross_entropies(data.train, data.val, size, QUICK, QUICK)
    return dict(zip(("losses", "counted_tokens", "evaluated_tokens"), results, strict=True)) if results else None


def cross_entropies(
    train: Split, held_out: Split, vocab_size: int, counted: int, evaluated: int
) -> tuple[dict[str, float], int, int] | None:
    """Fit n-gram models to a sample of the training ids, and evaluate them on a sample of held-out ids.

    Args:
        train: ids for training, of all sources of a mixture regardless of their weights.
        held_out: ids to evaluate on.
        vocab_size: V, the number of ids that share the probability.
        counted: maximum number of training ids.
        evaluated: maximum number of held-out ids.

    Returns:
        Losses in nats per token, and the numbers of n-grams counted and evaluated; None if a split has no trigram.
    """
    fitted = np.concatenate([_trigrams(train, vocab_size, *block) for block in sample(len(train), counted)])
    tested = np.concatenate([_trigrams(held_out, vocab_size, *block) for block in sample(len(held_out), evaluated)])
    if not len(fitted) or not len(tested):
        return None
    entropies = ngrams.cross_entropies(fitted, tested, vocab_size)
    losses = dict(zip(("unigram", "bigram", "trigram"), entropies, strict=True))
    return {"uniform": math.log(vocab_size)} | losses, len(fitted), len(tested)


def compressed_bits(data: Data) -> float:
    """Return the bits per byte of the held-out text after gzip that has read the end of the training text."""
    text = data.decode(data.val, 0, COMPRESSED).encode()[:COMPRESSED]
    begin = max(len(data.train) - GZIP_WINDOW, 0)
    before = data.decode(data.train, begin, GZIP_WINDOW).encode() if data.held_out else b""
    return gzip_bits(text, before)


def gzip_bits(text: bytes, before: bytes = b"") -> float:
    """Return the bits per byte of a text after gzip (DEFLATE, level 9) that has read the last 32 KB of `before`."""
    compressor = zlib.compressobj(9, wbits=-15, zdict=before[-GZIP_WINDOW:])
    return 8 * len(compressor.compress(text) + compressor.flush()) / len(text)


def sample(length: int, limit: int) -> list[tuple[int, int]]:
    """Return the start and length of evenly spaced blocks with at most `limit` of `length` tokens; one block if all fit."""
    if length <= limit:
        return [(0, length)]
    return [(int(start), SAMPLED) for start in np.linspace(0, length - SAMPLED, limit // SAMPLED)]


def _trigrams(split: Split, base: int, start: int, n: int) -> np.ndarray:
    """Return the keys of the trigrams of one document whose last token is a target."""
    if isinstance(split, Mixture):
        parts = split.parts(start, n)
        return np.concatenate([_trigrams(split.sources[index], base, *block) for index, *block in parts])
    if isinstance(split, Packed) and split.is_target is None:
        return _trigrams(split.tokens, base, start, n)
    ids = split.take(start, n)
    keys = trigrams(ids, base)
    if isinstance(split, Packed) and split.is_target is not None:
        index = np.arange(start, start + n)
        begins = np.sort(split.begins)
        inside = index >= begins[np.searchsorted(begins, index, side="right") - 1] + 2
        return keys[(inside & split.is_target[start : start + n])[2:]]
    if isinstance(split, Tokens) and split.end_ids:
        ends = np.isin(ids, split.end_ids)
        return keys[~(ends[:-2] | ends[1:-1])]
    return keys
