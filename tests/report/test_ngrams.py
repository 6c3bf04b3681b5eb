"""Statistics of ids: equal to their definitions, counted in plain Python, and right for texts with known answers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data import Mixture, Tokens
from jaxgpt.errors import UserError
from jaxgpt.report.fitted_ngrams import fit_ngrams
from jaxgpt.report.hashes import Grams, overlap
from jaxgpt.report.ngrams import GramCounts, cross_entropies, probabilities, trigrams

BASE = 4
TEXTS = st.lists(st.integers(0, BASE - 1), min_size=3, max_size=60).map(np.array)


def definition(grams: list[tuple[int, ...]], gram: tuple[int, ...], vocab_size: int) -> float:
    """Compute the formula in the docstring of `probabilities` from the trigrams of the training text."""
    last = gram[-1]
    count = sum(each[-1] == last for each in grams)
    p = (count + 1) / (len(grams) + vocab_size)
    for n in range(2, len(gram) + 1):
        after = [each[-1] for each in grams if each[-n:-1] == gram[-n:-1]]
        kinds = len(set(after))
        if after:
            p = (after.count(last) + kinds * p) / (len(after) + kinds)
    return p


@settings(max_examples=40)
@given(TEXTS)
def test_probabilities_equal_their_definition_and_sum_to_one(ids: np.ndarray) -> None:
    """Test every context, including contexts that do not occur."""
    words = ids.tolist()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    keys = np.arange(BASE**3)
    key_grams = list(itertools.product(range(BASE), repeat=3))
    for order, p in enumerate(probabilities(trigrams(ids, BASE), keys, BASE), 1):
        expected = [definition(grams, gram[-order:], BASE) for gram in key_grams]
        np.testing.assert_allclose(p, expected, rtol=1e-12)
        np.testing.assert_allclose(p.reshape(-1, BASE).sum(1), 1, rtol=1e-12)


def as_dict(counts: Iterable[np.ndarray]) -> dict[int, int]:
    """Return keys and counts as a dict."""
    keys, numbers = counts
    return dict(zip(keys.tolist(), numbers.tolist(), strict=True))


@settings(max_examples=30)
@given(TEXTS)
def test_counts(ids: np.ndarray) -> None:
    keys = trigrams(ids, BASE)
    words = ids.tolist()
    grams = zip(words, words[1:], words[2:], strict=False)
    expected = Counter(a * 16 + b * 4 + c for a, b, c in grams)
    counts = GramCounts.of(keys)
    assert as_dict(counts) == expected

    seen, kinds = map(as_dict, counts.contexts(BASE))
    assert seen == Counter(key // BASE for key in keys.tolist())
    assert kinds == Counter(key // BASE for key in set(keys.tolist()))
    assert counts.lookup(np.arange(BASE**3)).tolist() == [expected[k] for k in range(BASE**3)]


def entropies(ids: np.ndarray, base: int, evaluated: np.ndarray | None = None) -> list[float]:
    """Return the cross entropies of unigrams, bigrams and trigrams, on the ids themselves unless others are given."""
    evaluated = ids if evaluated is None else evaluated
    found = cross_entropies(trigrams(ids, base), trigrams(evaluated, base), base)
    return list(found.values())


def test_random_ids_have_the_entropy_of_a_uniform_distribution() -> None:
    """The longer the context, the fewer the counts."""
    ids = np.random.default_rng(0).integers(0, 50, 40_000)
    unigram, bigram, trigram = entropies(ids[:30_000], 50, ids[30_000:])
    assert unigram == pytest.approx(math.log(50), abs=0.01)
    assert math.log(50) < bigram < trigram


def test_the_entropy_of_a_periodic_text() -> None:
    """The id after 0 is 1 or 2, each in half of the cases, and determined by the two ids before it."""
    ids = np.tile([0, 1, 0, 2], 1000)
    expected = [1.5 * math.log(2), 0.5 * math.log(2), 0]
    assert entropies(ids, 3) == pytest.approx(expected, abs=0.01)


def test_a_markov_chain_has_its_entropy_rate() -> None:
    """Trigrams are no better than bigrams."""
    steps = np.random.default_rng(0).choice([1, 2], 40_000, p=[0.8, 0.2])
    ids = np.cumsum(steps) % 10
    rate = -0.8 * math.log(0.8) - 0.2 * math.log(0.2)
    _, bigram, trigram = entropies(ids[:30_000], 10, ids[30_000:])
    assert [bigram, trigram] == pytest.approx([rate, rate], abs=0.02)


def test_a_constant_text_has_no_entropy() -> None:
    assert entropies(np.zeros(10, np.int32), 1) == [0, 0, 0]


def test_large_vocabularies() -> None:
    ids = np.array([2**21 - 2, 2**21 - 2, 2**21 - 2])
    assert trigrams(ids, 2**21 - 1).tolist() == [(2**21 - 1) ** 3 - 1]
    with pytest.raises(UserError, match="2,097,152; use a tokenizer with at most 2,097,151 ids"):
        trigrams(ids, 2**21)


@settings(max_examples=40)
@given(TEXTS, TEXTS, st.integers(1, 5), st.integers(1, 70))
def test_overlap_equals_that_of_sets(train: np.ndarray, val: np.ndarray, n: int, block: int) -> None:
    def grams(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]

    val_grams = grams(val.tolist())
    assert len(Grams(val).of(n)) == len(val_grams)
    if not val_grams:
        return
    known = set(grams(train.tolist()))
    expected = np.mean([gram in known for gram in val_grams])
    blocks = (Grams(train[i : i + block + n - 1]).of(n) for i in range(0, len(train), block))
    assert overlap(Grams(val).of(n), blocks) == pytest.approx(expected)


def test_a_mixture_without_ids_has_no_trigrams() -> None:
    train = Tokens([np.arange(9)], vocab_size=9)
    empty = Mixture.constant([Tokens([], vocab_size=9)], [1])
    assert fit_ngrams(train, empty, 9, counted=1 << 20, evaluated=1 << 20) is None
