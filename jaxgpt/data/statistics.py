"""Statistics of token ids and texts: n-gram models, shared n-grams, repeated documents, and compression.

An n-gram of token ids is written as one integer, its key: `(a * base + b) * base + c` for the trigram (a, b, c), where all
ids are below `base`. The key of its last `n` tokens is `key % base**n`, that of its context `key // base`.
"""

from __future__ import annotations

import hashlib
import lzma
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxgpt.errors import UserError

ORDER = 3  # tokens of the longest n-gram of the models
GRAM = 13  # tokens of the n-grams that two texts share by more than chance
MAX_BASE = 2**21 - 1  # three ids below it fit in an int64
EVENTS = 1 << 20  # n-grams of each order to fit the weights on
STEPS = 40  # of a bisection for each weight
WINDOW = 1 << 15  # bytes that gzip looks back
MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd constants of splitmix64
FILTER = 24  # bits of a hash that select the candidates for a match


class Counts(NamedTuple):
    """Distinct keys in ascending order, and how often each occurs. Both are int64."""

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

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the count of each key, 0 if it does not occur."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


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

    The weight w depends on k and on n(context): there is one for each power of two, and it is 0 for a context that does not
    occur. Weights maximize the likelihood of the training n-grams when each is left out of the counts.

    Attributes:
        base: all ids are smaller.
        vocab_size: V, the number of ids that share the probability.
        counts: of the unigrams, bigrams and trigrams.
        contexts: of the bigrams and trigrams: counts of the tokens before the last.
        weights: of the bigrams and trigrams, by `bucket` of the context's count, float64 `[64]`.
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
            vocab_size: V, at least the number of different ids.
        """
        counts = [Counts.of(keys % base**n) for n in range(1, ORDER + 1)]
        model = NGrams(base, vocab_size, counts, [each.contexts(base) for each in counts[1:]], [])
        for n in range(2, ORDER + 1):
            every = -(-len(counts[n - 1].keys) // EVENTS)
            grams, times = counts[n - 1].keys[::every], counts[n - 1].counts[::every]
            lower = model.probability(grams, n - 1, without=1)
            higher, seen = model._relative(grams, n, without=1)
            weights = [*model.weights, _fit_weights(higher, lower, bucket(seen), times)]
            model = NGrams(base, vocab_size, counts, model.contexts, weights)
        return model

    def probability(self, keys: np.ndarray, order: int, without: int = 0) -> np.ndarray:
        """Return the probability of the last token of each n-gram after the `order - 1` tokens before it, float64.

        Args:
            keys: n-grams of at least `order` tokens.
            order: 1, 2 or 3.
            without: subtract this from the counts of the n-gram: 1 leaves out one occurrence, which must be counted.
        """
        total = int(self.counts[0].counts.sum()) - without
        p: np.ndarray = (self.counts[0].find(keys % self.base) - without + 1) / (total + self.vocab_size)
        for n in range(2, order + 1):
            relative, seen = self._relative(keys % self.base**n, n, without)
            weight = self.weights[n - 2][bucket(seen)]
            p = weight * relative + (1 - weight) * p
        return p

    def cross_entropies(self, keys: np.ndarray) -> list[float]:
        """Return the cross entropy of trigrams under the unigram, bigram and trigram model, in nats per token."""
        test = Counts.of(keys)
        logs = [np.log(self.probability(test.keys, n)) for n in range(1, ORDER + 1)]
        return [abs(float(np.average(log, weights=test.counts))) for log in logs]

    def _relative(self, keys: np.ndarray, n: int, without: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the relative frequency of each n-gram after its context, and the count of its context."""
        seen = self.contexts[n - 2].find(keys // self.base) - without
        return (self.counts[n - 1].find(keys) - without) / np.maximum(seen, 1), seen


def bucket(counts: np.ndarray) -> np.ndarray:
    """Return 0 for a count of 0, 1 for 1, 2 for 2 to 3, 3 for 4 to 7, and so on."""
    exponents: np.ndarray = np.frexp(counts.astype(np.float64))[1]
    return exponents


def _fit_weights(higher: np.ndarray, lower: np.ndarray, buckets: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Maximize the sum of `times * log(w higher + (1 - w) lower)` over the weight w of each bucket.

    One more observation with the weight of the bucket before keeps each weight below 1, and defines those of buckets
    without observations.
    """
    weights = np.zeros(64)
    for b in range(1, len(weights)):
        t, p, gain = (each[buckets == b] for each in (times, lower, higher - lower))
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


def gram_hashes(ids: np.ndarray, n: int = GRAM) -> np.ndarray:
    """Return a 64-bit hash of the n-gram at each id but the last `n - 1`."""
    size = max(len(ids) - n + 1, 0)
    mixed = mix(ids.astype(np.uint64) + np.uint64(1))
    hashes = np.zeros(size, np.uint64)
    for i in range(n):
        hashes = hashes * np.uint64(MIX[0]) + mixed[i : i + size]
    return mix(hashes)


def overlap(hashes: np.ndarray, training: Iterable[np.ndarray]) -> float:
    """Return the fraction of hashes that occur in the training hashes, which are read once, in blocks.

    Takes memory for `hashes`, a block, and a table of 16 MB that excludes most of the others at once.
    """
    wanted = Counts.of(hashes)
    found = np.zeros(len(wanted.keys), bool)
    table = np.zeros(1 << FILTER, bool)
    shift = np.uint64(64 - FILTER)
    table[wanted.keys >> shift] = True
    for block in training:
        candidates = block[table[block >> shift]]
        place = np.minimum(np.searchsorted(wanted.keys, candidates), len(found) - 1)
        found[place[wanted.keys[place] == candidates]] = True
    return float(wanted.counts[found].sum() / len(hashes))


def document_hashes(blocks: Iterable[np.ndarray], end_ids: Sequence[int]) -> np.ndarray:
    """Return a 64-bit hash of each document of a sequence of ids, given in blocks.

    One of `end_ids`, which is not hashed, ends a document or, in llm.c's files, begins it. The sequence ends the last one.
    """
    hashes, digest, begun = [], hashlib.blake2b(digest_size=8), False
    for ids in blocks:
        ends = np.flatnonzero(np.isin(ids, end_ids))
        for begin, end in zip([0, *(ends + 1)], [*ends, None], strict=True):
            piece = ids[begin:end]
            digest.update(piece.astype("<i4").tobytes())
            begun |= len(piece) > 0
            if end is not None and begun:
                hashes.append(digest.digest())
                digest, begun = hashlib.blake2b(digest_size=8), False
    hashes += [digest.digest()] * begun
    return np.frombuffer(b"".join(hashes), "<u8")


def repeated(hashes: np.ndarray) -> int:
    """Count the items that equal an earlier one."""
    return len(hashes) - len(np.unique(hashes))


def gzip_bits(text: bytes, before: bytes = b"") -> float:
    """Return the bits per byte of a text after gzip (DEFLATE, level 9) that has seen the last 32 KB of `before`."""
    compressor = zlib.compressobj(9, wbits=-15, zdict=before[-WINDOW:])
    return 8 * len(compressor.compress(text) + compressor.flush()) / len(text)


def xz_bits(text: bytes, before: bytes = b"") -> float:
    """Return the bits per byte that a text adds to `before` when both are compressed by xz (LZMA2)."""
    alone = len(lzma.compress(before, lzma.FORMAT_RAW, filters=_LZMA2)) if before else 0
    return 8 * (len(lzma.compress(before + text, lzma.FORMAT_RAW, filters=_LZMA2)) - alone) / len(text)


_LZMA2 = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


def mix(x: np.ndarray) -> np.ndarray:
    """Spread the bits of uint64 numbers."""
    x = (x ^ (x >> np.uint64(31))) * np.uint64(MIX[1])
    mixed: np.ndarray = x ^ (x >> np.uint64(32))
    return mixed
