"""Statistics of ids: equal to their definitions, counted in plain Python, and right for texts with known answers."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import UserError
from jaxgpt.report.baselines import Counts, cross_entropies, probabilities, trigrams
from jaxgpt.report.hashes import Grams, overlap

BASE = 4
TEXTS = st.lists(st.integers(0, BASE - 1), min_size=3, max_size=60).map(np.array)


def definition(grams: list[tuple[int, ...]], gram: tuple[int, ...], vocab_size: int) -> float:
    """Compute the formula in the docstring of `probabilities` from the trigrams of the training text."""
    p = (sum(each[-1] == gram[-1] for each in grams) + 1) / (len(grams) + vocab_size)
    for n in range(2, len(gram) + 1):
        after = [each[-1] for each in grams if each[-n:-1] == gram[-n:-1]]
        if after:
            p = (after.count(gram[-1]) + len(set(after)) * p) / (len(after) + len(set(after)))
    return p


@settings(max_examples=40)
@given(TEXTS)
def test_probabilities_equal_their_definition_and_sum_to_one(ids: np.ndarray) -> None:
    """Test every context, including contexts that do not occur."""
    words = ids.tolist()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    keys = np.arange(BASE**3)
    for order, p in enumerate(probabilities(trigrams(ids, BASE), keys, BASE), 1):
        each = [(k // BASE**2, k // BASE % BASE, k % BASE)[-order:] for k in keys.tolist()]
        np.testing.assert_allclose(p, [definition(grams, gram, BASE) for gram in each], rtol=1e-12)
        np.testing.assert_allclose(p.reshape(-1, BASE).sum(1), 1, rtol=1e-12)


@settings(max_examples=30)
@given(TEXTS)
def test_counts(ids: np.ndarray) -> None:
    keys = trigrams(ids, BASE)
    words = ids.tolist()
    expected = Counter(a * 16 + b * 4 + c for a, b, c in zip(words, words[1:], words[2:], strict=False))
    counts = Counts.of(keys)
    assert dict(zip(*map(np.ndarray.tolist, counts), strict=True)) == expected
    seen, kinds = (dict(zip(*map(np.ndarray.tolist, each), strict=True)) for each in counts.contexts(BASE))
    assert seen == Counter(key // BASE for key in keys.tolist())
    assert kinds == Counter(key // BASE for key in set(keys.tolist()))
    assert counts.lookup(np.arange(BASE**3)).tolist() == [expected[k] for k in range(BASE**3)]


def entropies(ids: np.ndarray, base: int, of: np.ndarray | None = None) -> list[float]:
    return [*cross_entropies(trigrams(ids, base), trigrams(ids if of is None else of, base), base).values()]


def test_texts_with_a_known_entropy() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 40_000)
    unigram, bigram, trigram = entropies(ids[:30_000], 50, ids[30_000:])
    assert unigram == pytest.approx(math.log(50), abs=0.01)
    assert math.log(50) < bigram < trigram, "random ids: the longer the context, the fewer the counts"
    unigram, bigram, trigram = entropies(np.tile([0, 1, 0, 2], 1000), 3)
    assert [unigram, bigram, trigram] == pytest.approx([1.5 * math.log(2), 0.5 * math.log(2), 0], abs=0.01)
    # A Markov chain: the bigram has the entropy rate of the chain, and the trigram is no better.
    ids = np.cumsum(rng.choice([1, 2], 40_000, p=[0.8, 0.2])) % 10
    rate = -0.8 * math.log(0.8) - 0.2 * math.log(0.2)
    assert entropies(ids[:30_000], 10, ids[30_000:])[1:] == pytest.approx([rate] * 2, abs=0.02)
    assert entropies(np.zeros(10, np.int32), 1) == [0, 0, 0]


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

    assert len(Grams(val).of(n)) == len(grams(val.tolist()))
    if len(val) < n:
        return
    known = set(grams(train.tolist()))
    expected = np.mean([gram in known for gram in grams(val.tolist())])
    blocks = (Grams(train[i : i + block + n - 1]).of(n) for i in range(0, len(train), block))
    assert overlap(Grams(val).of(n), blocks) == pytest.approx(expected)
