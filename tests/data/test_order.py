"""The order of an epoch by formula: a permutation, uniform according to statistical tests."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from jaxgpt.data import Batches, Tokens
from jaxgpt.data.order import ROUNDS, SORTED, draw, permute, shuffled

LARGE = 10**10
SAMPLE = 1 << 17
BINS = 256


def keys(seed: int, epoch: int = 0) -> np.ndarray:
    return draw(seed, "order", epoch, ROUNDS)


def uniform(values: np.ndarray) -> bool:
    """Return whether values below BINS pass a chi-square test at six standard deviations."""
    counts = np.bincount(values, minlength=BINS)
    expected = len(values) / BINS
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi_square - (BINS - 1)) < 6 * (2 * (BINS - 1)) ** 0.5


@pytest.mark.parametrize("seed", range(3))
def test_each_item_once(seed: int) -> None:
    for n in range(1, 301):
        assert (np.sort(permute(np.arange(n), n, keys(seed))) == np.arange(n)).all()


@pytest.mark.parametrize("n", [SORTED + 1, LARGE - 7])
def test_places_are_permuted_one_by_one(n: int) -> None:
    places = np.array([0, 1, n // 2, n - 1])
    together = permute(places, n, keys(1))
    assert together.tolist() == [int(permute(np.array([place]), n, keys(1))[0]) for place in places]
    assert ((together >= 0) & (together < n)).all()


def test_all_orders_of_four_items_are_equally_likely() -> None:
    found = Counter(tuple(permute(np.arange(4), 4, keys(seed)).tolist()) for seed in range(2400))
    assert len(found) == 24
    assert max(abs(count - 100) for count in found.values()) < 50


@pytest.mark.parametrize("first", [0, LARGE // 3])
def test_a_large_order_looks_random(first: int) -> None:
    """Positions, their remainders, and distances of neighbors are uniform; epochs and seeds are independent."""
    places = np.arange(first, first + SAMPLE)
    order = permute(places, LARGE, keys(1))
    assert len(np.unique(order)) == SAMPLE
    assert uniform(order * BINS // LARGE)
    assert uniform(order % BINS)
    assert uniform(np.diff(order) % LARGE * BINS // LARGE), "neighbors"
    for other in (keys(1, epoch=1), keys(2)):
        assert uniform((permute(places, LARGE, other) - order) % LARGE * BINS // LARGE)
    # Changing any bit of the position moves the result by a uniformly distributed difference.
    for bit in range(30):
        assert uniform((permute(places ^ (1 << bit), LARGE, keys(1)) - order) % LARGE * BINS // LARGE), bit


def test_the_order_does_not_change_between_versions() -> None:
    """Resuming with a different version of NumPy or jaxgpt must draw the same windows."""
    assert shuffled(np.arange(4), SORTED, 1337, 2).tolist() == [938399, 226706, 91013, 509328]
    assert shuffled(np.arange(4), SORTED + 1, 1337, 2).tolist() == [163064, 49666, 473051, 583674]


def test_an_epoch_of_10_billion_tokens_needs_no_array_of_its_windows() -> None:
    tokens = Tokens([np.broadcast_to(np.zeros(1, np.uint16), LARGE)])  # strided: one id in memory
    batches = Batches(tokens, 1024, 64, 1)
    tracemalloc.start()
    assert batches.at(10**6)[:].shape == (64, 1025)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
