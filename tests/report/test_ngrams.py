"""Statistics of ids: equal to their definitions, counted in plain Python, and right for texts with known answers."""

from __future__ import annotations

import gzip
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import UserError
from jaxgpt.report.baselines import gzip_bits, xz_bits
from jaxgpt.report.hashes import count_duplicates, document_hashes, gram_hashes, overlap
from jaxgpt.report.ngrams import Counts, NGrams, log2_bin, trigrams

BASE = 4
TEXTS = st.lists(st.integers(0, BASE - 1), min_size=3, max_size=60).map(np.array)


def fitted(ids: np.ndarray, vocab_size: int = BASE, base: int = BASE) -> NGrams:
    return NGrams.fit(trigrams(ids, base), base, vocab_size)


def definition(model: NGrams, grams: list[tuple[int, ...]], gram: tuple[int, ...]) -> float:
    """Compute the formula in the docstring of `NGrams` from the trigrams of the training text."""
    p = (sum(each[-1] == gram[-1] for each in grams) + 1) / (len(grams) + model.vocab_size)
    for n in range(2, len(gram) + 1):
        after = [each[-1] for each in grams if each[-n:-1] == gram[-n:-1]]
        if after:
            w = model.weights[n - 2][len(after).bit_length()]
            p = w * after.count(gram[-1]) / len(after) + (1 - w) * p
    return float(p)


@settings(max_examples=40)
@given(TEXTS, st.integers(0, 2))
def test_probabilities_equal_their_definition_and_sum_to_one(ids: np.ndarray, unused: int) -> None:
    """For every context, also one that does not occur."""
    model = fitted(ids, BASE + unused)
    words = ids.tolist()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    keys = np.arange(BASE**3)
    for order in (1, 2, 3):
        p = model.probability(keys, order)
        expected = [
            definition(model, grams, (k // BASE**2, k // BASE % BASE, k % BASE)[-order:]) for k in keys.tolist()
        ]
        np.testing.assert_allclose(p, expected, rtol=1e-12)
        # An id that does not occur has no key.
        others = [definition(model, grams, (k // BASE, k % BASE, -1)[-order:]) for k in range(BASE**2)]
        np.testing.assert_allclose(p.reshape(-1, BASE).sum(1) + unused * np.array(others), 1, rtol=1e-12)


@settings(max_examples=30)
@given(TEXTS)
def test_leaving_one_out_equals_a_text_without_it(ids: np.ndarray) -> None:
    keys = trigrams(ids, BASE)
    model = NGrams.fit(keys, BASE, BASE)
    for i in range(min(len(keys), 5)):
        counts = [Counts.of(np.delete(keys, i) % BASE**n) for n in (1, 2, 3)]
        without = NGrams(BASE, BASE, counts, [each.contexts(BASE) for each in counts[1:]], model.weights)
        for order in (1, 2, 3):
            left_out = model.probability(keys[i : i + 1], order, without=1)
            np.testing.assert_allclose(left_out, without.probability(keys[i : i + 1], order), rtol=1e-12)


@settings(max_examples=30)
@given(TEXTS)
def test_counts(ids: np.ndarray) -> None:
    keys = trigrams(ids, BASE)
    words = ids.tolist()
    expected = Counter(a * 16 + b * 4 + c for a, b, c in zip(words, words[1:], words[2:], strict=False))
    counts = Counts.of(keys)
    assert dict(zip(*map(np.ndarray.tolist, counts), strict=True)) == expected
    contexts = Counter(key // BASE for key in keys.tolist())
    assert dict(zip(*map(np.ndarray.tolist, counts.contexts(BASE)), strict=True)) == contexts
    assert counts.lookup(np.arange(BASE**3)).tolist() == [expected[k] for k in range(BASE**3)]


def test_bins_are_powers_of_two() -> None:
    n = [0, 1, 2, 3, 4, 7, 8, 2**40 - 1, 2**40]
    assert log2_bin(np.array(n)).tolist() == [count.bit_length() for count in n]


def test_weights_maximize_the_likelihood_of_what_is_left_out() -> None:
    """And of one more observation, which has the weight of the previous bin."""
    rng = np.random.default_rng(0)
    ids = np.cumsum(rng.choice([0, 1, 2], 3000, p=[0.1, 0.6, 0.3])) % 8
    keys = trigrams(ids, 8)
    model = NGrams.fit(keys, 8, 8)

    def likelihood(order: int, b: int, change: float) -> float:
        weights = [each.copy() for each in model.weights]
        w = weights[order - 2][b] = weights[order - 2][b] + change
        before = weights[order - 2][b - 1]
        changed = NGrams(8, 8, model.counts, model.contexts, weights)
        p = changed.probability(keys, order, without=1)
        return float(np.log(p).sum() + before * math.log(w) + (1 - before) * math.log(1 - w))

    for order in (2, 3):
        b = int(np.median(log2_bin(model.contexts[order - 2].lookup(keys % 8**order // 8) - 1)))
        best = likelihood(order, b, 0.0)
        room = min(model.weights[order - 2][b], 1 - model.weights[order - 2][b])
        assert room > 0
        assert max(likelihood(order, b, room * change) for change in (-0.5, -0.1, 0.1, 0.5)) < best


def test_random_ids_have_the_entropy_of_a_uniform_guess() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 40_000)
    model = fitted(ids[:30_000], 50, 50)
    assert model.cross_entropies(trigrams(ids[30_000:], 50)) == pytest.approx([math.log(50)] * 3, abs=0.01)


def test_a_periodic_text_has_an_entropy_near_zero() -> None:
    """After two tokens the next one is certain; after one it is not."""
    ids = np.tile([0, 1, 0, 2], 1000)
    unigram, bigram, trigram = fitted(ids).cross_entropies(trigrams(ids, BASE))
    assert unigram == pytest.approx(1.5 * math.log(2), abs=0.01)
    assert bigram == pytest.approx(0.5 * math.log(2), abs=0.01)
    assert 0 <= trigram < 0.002


def test_a_markov_chain_needs_a_bigram() -> None:
    """The bigram has the entropy rate of the chain, and the trigram is no better."""
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.choice([1, 2], 40_000, p=[0.8, 0.2])) % 10
    _, bigram, trigram = fitted(ids[:30_000], 10, 10).cross_entropies(trigrams(ids[30_000:], 10))
    rate = -0.8 * math.log(0.8) - 0.2 * math.log(0.2)
    assert [bigram, trigram] == pytest.approx([rate] * 2, abs=0.02)


def test_one_token_has_no_entropy() -> None:
    ids = np.zeros(10, np.int32)
    assert fitted(ids, 1, 1).cross_entropies(trigrams(ids, 1)) == [0, 0, 0]


def test_large_vocabularies() -> None:
    ids = np.array([2**21 - 2, 2**21 - 2, 2**21 - 2])
    assert trigrams(ids, 2**21 - 1).tolist() == [(2**21 - 1) ** 3 - 1]
    with pytest.raises(UserError, match="2,097,152; the limit is 2,097,151"):
        trigrams(ids, 2**21)


@settings(max_examples=40)
@given(TEXTS, TEXTS, st.integers(1, 5), st.integers(1, 70))
def test_overlap_equals_that_of_sets(train: np.ndarray, val: np.ndarray, n: int, block: int) -> None:
    def grams(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]

    assert len(gram_hashes(val, n)) == len(grams(val.tolist()))
    if len(val) < n:
        return
    known = set(grams(train.tolist()))
    expected = np.mean([gram in known for gram in grams(val.tolist())])
    blocks = (gram_hashes(train[i : i + block + n - 1], n) for i in range(0, len(train), block))
    assert overlap(gram_hashes(val, n), blocks) == pytest.approx(expected)


def test_overlap_of_a_copy_and_of_other_text() -> None:
    ids = np.random.default_rng(0).integers(0, 1000, 20_000)
    hashes = gram_hashes(ids[:5000])
    assert len(np.unique(hashes)) == len(hashes)
    assert overlap(hashes, [gram_hashes(ids)]) == 1
    assert overlap(hashes, [gram_hashes(ids[5000:])]) == 0


@settings(max_examples=40)
@given(TEXTS, st.integers(1, 70))
def test_documents_are_equal_if_their_hashes_are(ids: np.ndarray, block: int) -> None:
    """Wherever blocks end; an end token, or several, end a document."""
    text = "".join("abc."[i] for i in ids)
    documents = [each for each in text.split(".") if each]
    hashes = document_hashes((ids[i : i + block] for i in range(0, len(ids), block)), (3,))
    assert len(hashes) == len(documents)
    assert len(set(hashes.tolist())) == len(set(documents))
    assert count_duplicates(hashes) == len(documents) - len(set(documents))


def test_compressed_bits() -> None:
    random.seed(0)
    noise, words = random.randbytes(5000), b"to be or not to be, that is the question. " * 100
    assert gzip_bits(words) == pytest.approx(8 * len(gzip.compress(words, 9)) / len(words), abs=8 * 20 / len(words))
    for bits in (gzip_bits, xz_bits):
        assert bits(noise) == pytest.approx(8, abs=0.1)
        assert bits(noise, words) == pytest.approx(8, abs=0.1)
        assert bits(words) < 0.3
        assert bits(noise, noise) < 0.2
    far = noise + bytes(40_000)
    assert xz_bits(noise, far) < 0.2, "xz looks back further than gzip"
    assert gzip_bits(noise, far) > 7
