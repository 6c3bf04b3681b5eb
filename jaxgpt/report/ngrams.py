"""N-gram models of ids: counts, interpolated probabilities, and cross entropies.

An n-gram is encoded as one integer, its key: `(a * base + b) * base + c` for the trigram (a, b, c) of ids below `base`. The
key of its last m tokens is `key % base**m`; the key of its context, all tokens but the last, is `key // base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxgpt.errors import UserError

MAX_BASE = 2**21 - 1  # largest base with a cube that fits in an int64


def trigrams(ids: np.ndarray, base: int) -> np.ndarray:
    """Return the keys of all trigrams of consecutive ids in order, int64; raise `UserError` if `base` is too large."""
    if base > MAX_BASE:
        raise UserError(
            f"the vocabulary is too large to count trigrams: {base:,}; use a tokenizer with at most {MAX_BASE:,} ids"
        )
    ids = ids.astype(np.int64)
    keys: np.ndarray = (ids[:-2] * base + ids[1:-1]) * base + ids[2:]
    return keys


class GramCounts(NamedTuple):
    """Distinct keys in ascending order, and the count of each; int64."""

    keys: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(keys: np.ndarray) -> GramCounts:
        """Count keys."""
        return GramCounts(*np.unique(keys, return_counts=True))

    def contexts(self, base: int) -> tuple[GramCounts, GramCounts]:
        """Count the occurrences and the distinct continuations of each context of the n-grams."""
        keys = self.keys // base
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        occurrences = np.add.reduceat(self.counts, first)
        continuations = np.diff(first, append=len(keys))
        return GramCounts(keys[first], occurrences), GramCounts(keys[first], continuations)

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Return the count of each key; 0 if the key does not occur."""
        index = np.searchsorted(self.keys, keys)
        index = np.minimum(index, len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.counts[index], 0)


def probabilities(training: np.ndarray, keys: np.ndarray, base: int) -> Iterator[np.ndarray]:
    """Yield each trigram's last-token probability under unigram, bigram and trigram models, float64.

    The models are interpolated (Witten and Bell, 1991). n(gram) is the number of occurrences in the training trigrams, N the
    number of these trigrams, and t(context) the number of different tokens after a context:

        p_1(c)           = (n(c) + 1) / (N + V)
        p_k(c | context) = (n(context c) + t(context) * p_{k-1}(c | shorter context)) / (n(context) + t(context))

    A context that does not occur has the probabilities of the shorter context.

    Args:
        training: keys of the training trigrams, at least one.
        keys: keys of the trigrams to evaluate.
        base: vocabulary size V, the base of the trigram keys.
    """
    unigrams = GramCounts.of(training % base)
    p: np.ndarray = (unigrams.lookup(keys % base) + 1) / (len(training) + base)
    yield p

    for n in (2, 3):
        grams = GramCounts.of(training % base**n)
        of_n = keys % base**n
        occurrences, continuations = grams.contexts(base)
        seen = occurrences.lookup(of_n // base)
        kinds = continuations.lookup(of_n // base)
        interpolated = (grams.lookup(of_n) + kinds * p) / np.maximum(seen + kinds, 1)
        p = np.where(seen > 0, interpolated, p)
        yield p


def cross_entropies(training: np.ndarray, keys: np.ndarray, base: int) -> dict[str, float]:
    """Return the cross entropy under unigram, bigram and trigram models, in nats per token."""
    test = GramCounts.of(keys)
    models = zip(("unigram", "bigram", "trigram"), probabilities(training, test.keys, base), strict=True)
    losses = {}
    for name, p in models:
        mean = np.average(np.log(p), weights=test.counts)
        losses[name] = abs(float(mean))
    return losses
