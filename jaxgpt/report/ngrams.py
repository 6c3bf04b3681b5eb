"""N-gram models of token ids: counts, interpolation and cross entropy.

An n-gram is written as one integer, its key: `(a * base + b) * base + c` for the trigram (a, b, c) of ids below `base`. The
key of its last `n` tokens is `key % base**n`; the key of its context is `key // base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxgpt.errors import UserError

ORDER = 3  # tokens of the longest n-gram
MAX_BASE = 2**21 - 1  # three ids below it fit in an int64
EVENTS = 1 << 20  # n-grams of each order to fit the weights on
STEPS = 40  # steps of the bisection for each weight


class Counts(NamedTuple):
    """Distinct keys in ascending order, and the number of occurrences of each; int64."""

    keys: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(keys: np.ndarray) -> Counts:
        """Count keys."""
        return Counts(*np.unique(keys, return_counts=True))

    def contexts(self, base: int) -> Counts:
        """Count the contexts of n-grams: each key without its last token."""
        keys = self.keys // base
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        return Counts(keys[first], np.add.reduceat(self.counts, first) if len(first) else self.counts)

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Return the count of each key; 0 if the key does not occur."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.counts[index], 0)


def trigrams(ids: np.ndarray, base: int) -> np.ndarray:
    """Return the key of the trigram that ends at each id but the first two, int64."""
    if base > MAX_BASE:
        raise UserError(f"too many different tokens to count trigrams: {base:,}; the limit is {MAX_BASE:,}")
    ids = ids.astype(np.int64)
    keys: np.ndarray = (ids[:-2] * base + ids[1:-1]) * base + ids[2:]
    return keys


@dataclass(frozen=True)
class NGrams:
    """Interpolated n-gram models (Jelinek and Mercer, 1980).

        p_1(c)          = (n(c) + 1) / (N + V)
        p_k(c | context) = w n(context c) / n(context) + (1 - w) p_{k-1}(c | context without its first token)

    The weight w depends on k and on the power of two of n(context); it is 0 for a context that does not occur. Weights
    maximize the likelihood of the training n-grams, omitting each from the counts in turn.

    Attributes:
        base: all ids are smaller.
        vocab_size: V, the number of ids that share the probability.
        counts: counts of the unigrams, bigrams and trigrams.
        contexts: counts of the contexts of the bigrams and trigrams.
        weights: weights of the bigrams and trigrams by `log2_bin` of the context's count, float64 `[64]`.
    """

    base: int
    vocab_size: int
    counts: Sequence[Counts]
    contexts: Sequence[Counts]
    weights: Sequence[np.ndarray]

    @staticmethod
    def fit(keys: np.ndarray, base: int, vocab_size: int) -> NGrams:
        """Count n-grams and fit the weights.

        Args:
            keys: trigrams of the training text, `[n]`.
            base: all ids are smaller.
            vocab_size: V, at least the number of distinct ids.
        """
        counts = [Counts.of(keys % base**n) for n in range(1, ORDER + 1)]
        model = NGrams(base, vocab_size, counts, [each.contexts(base) for each in counts[1:]], [])
        for n in range(2, ORDER + 1):
            every = -(-len(counts[n - 1].keys) // EVENTS)
            grams, times = counts[n - 1].keys[::every], counts[n - 1].counts[::every]
            lower = model.probability(grams, n - 1, without=1)
            higher, seen = model._relative(grams, n, without=1)
            weights = [*model.weights, _fit_weights(higher, lower, log2_bin(seen), times)]
            model = NGrams(base, vocab_size, counts, model.contexts, weights)
        return model

    def probability(self, keys: np.ndarray, order: int, without: int = 0) -> np.ndarray:
        """Return the probability of the last token of each n-gram after the `order - 1` tokens before it, float64.

        Args:
            keys: n-grams of at least `order` tokens.
            order: 1, 2 or 3.
            without: occurrences of the n-gram to omit from the counts.
        """
        total = int(self.counts[0].counts.sum()) - without
        p: np.ndarray = (self.counts[0].lookup(keys % self.base) - without + 1) / (total + self.vocab_size)
        for n in range(2, order + 1):
            relative, seen = self._relative(keys % self.base**n, n, without)
            weight = self.weights[n - 2][log2_bin(seen)]
            p = weight * relative + (1 - weight) * p
        return p

    def cross_entropies(self, keys: np.ndarray) -> list[float]:
        """Return the cross entropy of trigrams under the unigram, bigram and trigram model, in nats per token."""
        test = Counts.of(keys)
        logs = [np.log(self.probability(test.keys, n)) for n in range(1, ORDER + 1)]
        return [abs(float(np.average(log, weights=test.counts))) for log in logs]

    def _relative(self, keys: np.ndarray, n: int, without: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the relative frequency of each n-gram after its context, and the count of its context."""
        seen = self.contexts[n - 2].lookup(keys // self.base) - without
        return (self.counts[n - 1].lookup(keys) - without) / np.maximum(seen, 1), seen


def log2_bin(counts: np.ndarray) -> np.ndarray:
    """Return 0 for a count of 0, 1 for 1, 2 for 2 to 3, 3 for 4 to 7, and so on."""
    exponents: np.ndarray = np.frexp(counts.astype(np.float64))[1]
    return exponents


def _fit_weights(higher: np.ndarray, lower: np.ndarray, bins: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Maximize the sum of `times * log(w higher + (1 - w) lower)` over the weight w of each bin.

    A pseudo-observation with the weight of the previous bin keeps each weight below 1, and defines the weights of bins
    without observations.
    """
    weights = np.zeros(64)
    for b in range(1, len(weights)):
        t, p, gain = (each[bins == b] for each in (times, lower, higher - lower))
        if not len(t):
            weights[b] = weights[b - 1]
            continue
        before, low, high = weights[b - 1], 0.0, 1.0
        for _ in range(STEPS):  # the derivative decreases
            w = (low + high) / 2
            slope = (t * gain / (p + w * gain)).sum() + before / w - (1 - before) / (1 - w)
            low, high = (w, high) if slope > 0 else (low, w)
        weights[b] = low
    return weights
