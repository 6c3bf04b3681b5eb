"""N-gram models of token ids: counts, interpolation and cross entropy.

An n-gram is written as one integer, its key: `(a * base + b) * base + c` for the trigram (a, b, c) of ids below `base`. The
key of its last `n` tokens is `key % base**n`; the key of its context is `key // base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxgpt.errors import UserError

MAX_BASE = 2**21 - 1  # largest base of a trigram key that fits in an int64


class Counts(NamedTuple):
    """Distinct keys in ascending order, and the number of occurrences of each; int64."""

    keys: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(keys: np.ndarray) -> Counts:
        """Count keys."""
        return Counts(*np.unique(keys, return_counts=True))

    def contexts(self, base: int) -> tuple[Counts, Counts]:
        """Count, for each context of the n-grams, its occurrences and its different continuations."""
        keys = self.keys // base
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        numbers = np.add.reduceat(self.counts, first), np.diff(first, append=len(keys))
        return Counts(keys[first], numbers[0]), Counts(keys[first], numbers[1])

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Return the count of each key; 0 if the key does not occur."""
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.counts[index], 0)


def trigrams(ids: np.ndarray, base: int) -> np.ndarray:
    """Return the key of the trigram that ends at each id but the first two, int64."""
    if base > MAX_BASE:
        raise UserError(f"the vocabulary is too large to count trigrams: {base:,}; the limit is {MAX_BASE:,}")
    ids = ids.astype(np.int64)
    keys: np.ndarray = (ids[:-2] * base + ids[1:-1]) * base + ids[2:]
    return keys


def probabilities(training: np.ndarray, keys: np.ndarray, base: int) -> Iterator[np.ndarray]:
    """Yield each trigram's last-token probability under unigram, bigram and trigram models, float64.

    The models are interpolated (Witten and Bell, 1991). n counts the training trigrams; t(context) is the number of different
    tokens after a context:

        p_1(c)           = (n(c) + 1) / (N + V)
        p_k(c | context) = (n(context c) + t(context) p_{k-1}(c | shorter context)) / (n(context) + t(context))

    A context that does not occur has the probabilities of the shorter context.

    Args:
        training: trigrams of the training text, at least one.
        keys: trigrams to evaluate.
        base: V, the number of ids that share the probability.
    """
    p: np.ndarray = (Counts.of(training % base).lookup(keys % base) + 1) / (len(training) + base)
    yield p
    for n in (2, 3):
        grams, of_n = Counts.of(training % base**n), keys % base**n
        seen, kinds = (each.lookup(of_n // base) for each in grams.contexts(base))
        p = np.where(seen > 0, (grams.lookup(of_n) + kinds * p) / np.maximum(seen + kinds, 1), p)
        yield p


def cross_entropies(training: np.ndarray, keys: np.ndarray, base: int) -> dict[str, float]:
    """Return the cross entropy under unigram, bigram and trigram models, in nats per token."""
    test = Counts.of(keys)
    models = zip(("unigram", "bigram", "trigram"), probabilities(training, test.keys, base), strict=True)
    return {name: abs(float(np.average(np.log(p), weights=test.counts))) for name, p in models}
