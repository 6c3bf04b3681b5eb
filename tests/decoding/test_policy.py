"""Filters and policies: what may be chosen, and how often it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import UserError
from jaxgpt.decoding import History, Policy, filters
from jaxgpt.decoding import choose as choose_
from jaxgpt.decoding import warp as warp_
from jaxgpt.decoding.policy import uniform

choose = jax.jit(choose_, static_argnums=4)
warp = jax.jit(warp_, static_argnums=2)


def history(*rows: list[int], size: int = 0) -> History:
    """Rows aligned at their ends, with `size` empty slots after them."""
    longest = max(map(len, rows))
    ids = np.full((len(rows), longest + size), 7, np.int32)  # what stands outside a row must not count
    for out, row in zip(ids, rows, strict=True):
        out[longest - len(row) : longest] = row
    start = jnp.array([longest - len(row) for row in rows], jnp.int32)
    return History(jnp.asarray(ids), start, jnp.int32(longest))


def kept(logits_BV: jax.Array) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(logits_BV)]


ANY = history([0])


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_the_rest() -> None:
    logits = jnp.array([[1.0, -1.0, 2.0, -2.0, 0.0]])
    out = warp(logits, history([0, 1, 0], size=3), Policy(repetition_penalty=2.0))
    np.testing.assert_array_equal(out[0], [0.5, -2.0, 2.0, -2.0, 0.0])


@pytest.mark.parametrize(
    ("n", "ids", "forbidden"),
    [
        (1, [1, 2, 1], {1, 2}),
        (2, [1, 2, 3, 1], {2}),
        (2, [1, 2, 1, 3, 1], {2, 3}),
        (3, [1, 2, 3, 1, 2], {3}),
        (3, [1, 2], set()),
    ],
)
def test_an_ngram_never_comes_twice(n: int, ids: list[int], forbidden: set[int]) -> None:
    other = [4, 4]  # a second row, shorter, must neither see the first nor the slots outside its own
    out = kept(warp(jnp.zeros((2, 8)), history(ids, other, size=3), Policy(no_repeat_ngram_size=n)))
    assert set(range(8)) - set(out[0]) == forbidden
    assert set(range(8)) - set(out[1]) == ({4} if n < 3 else set())


def test_top_k_keeps_what_equals_the_kth() -> None:
    logits = jnp.array([[3.0, 2.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    assert kept(filters.keep_top_k(logits, 2)) == [[0, 1, 2], [2, 3]]
    assert kept(filters.keep_top_k(logits, 9)) == [[0, 1, 2, 3]] * 2


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    for p, expected in ((0.0, [0]), (0.4, [0]), (0.6, [0, 1]), (0.8, [0, 1, 3]), (0.9, [0, 1, 2, 3])):
        assert kept(filters.keep_top_p(logits, p)) == [expected], p


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(p: float) -> None:
    rng = np.random.default_rng(0)
    for spread in (0.01, 1.0, 5.0):  # flat: the slice does not reach p; peaked: it does
        logits = rng.normal(0, spread, (3, 2000)).astype(np.float32)
        out = kept(filters.keep_top_p(jnp.asarray(logits), p))
        for row, ids in zip(logits.astype(np.float64), out, strict=True):
            order = np.argsort(-row)
            probability = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            size = max(1, int(np.searchsorted(np.cumsum(probability[order]), p) + 1)) if p else 1
            assert abs(len(ids) - size) <= 1  # the border itself is a matter of the last bit
            assert set(order[: size - 1].tolist()) <= set(ids) <= set(order[: size + 1].tolist())


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    assert kept(filters.keep_min_p(logits, 0.25)) == [[0, 1, 2]]
    assert kept(filters.keep_min_p(logits, 1.0)) == [[0]]


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(temperature=0.7),
        Policy(top_k=5),
        Policy(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.3, no_repeat_ngram_size=1),
    ],
)
@pytest.mark.parametrize("vocabulary", [30, 700])
def test_frequencies_are_the_probabilities(policy: Policy, vocabulary: int) -> None:
    draws = 40_000
    logits = jax.random.normal(jax.random.key(1), (1, vocabulary)) * 2
    past = history([3, 5, 3])
    probability = np.asarray(jax.nn.softmax(warp(logits, past, policy)), np.float64)[0]
    keys = jax.random.split(jax.random.key(2), draws)
    # One row of logits for all: the draws differ by their keys alone.
    ids = jax.jit(
        lambda: filters.draw(jnp.broadcast_to(warp(logits, past, policy), (draws, vocabulary)), uniform(keys, 0))
    )()
    seen = np.bincount(np.asarray(ids), minlength=vocabulary)
    assert seen[probability == 0].sum() == 0
    expected = probability * draws
    rare = expected < 5
    observed = np.append(seen[~rare], seen[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi2, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    # Chi-square with f degrees has mean f and variance 2f; the seed is fixed, so this does not flicker.
    assert abs(chi2 - freedom) < 4 * np.sqrt(2 * freedom), (chi2, freedom)


def test_draw_never_takes_what_is_forbidden() -> None:
    logits = jnp.full((4, 1000), -jnp.inf).at[:, 601].set(0.0).at[:, 700].set(-20.0)
    just_below_one = np.nextafter(np.float32(1), np.float32(0))
    ids = filters.draw(logits, jnp.array([0.0, 0.5, 0.999, just_below_one]))
    assert set(ids.tolist()) <= {601, 700}


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = jax.random.normal(jax.random.key(0), (5, 400))
    keys = jax.random.split(jax.random.key(1), 5)
    policy = Policy(temperature=0.9, top_p=0.9, repetition_penalty=1.2)
    rows = [[1, 2, 3], [4], [5, 6], [1, 1, 1, 1], [9]]
    together = choose(logits, history(*rows), keys, jnp.int32(3), policy)
    for i, row in enumerate(rows):
        alone = choose(logits[i : i + 1], history(row), keys[i : i + 1], jnp.int32(3), policy)
        assert alone[0] == together[i]


def test_temperature_zero_is_the_likeliest_the_first_of_equals() -> None:
    logits = jnp.array([[1.0, 5.0, 5.0], [-jnp.inf, -jnp.inf, 0.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert choose(logits, history([0], [0]), keys, jnp.int32(0), Policy(temperature=0)).tolist() == [1, 2]
    assert kept(warp(logits, history([0], [0]), Policy(temperature=0))) == [[1], [2]]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_k", -1), ("top_p", -0.1), ("top_p", 1.1), ("top_p", float("nan")), ("min_p", float("nan")), ("min_p", 2.0),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", float("nan")),
        ("no_repeat_ngram_size", -1),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_named(setting: str, value: float) -> None:
    with pytest.raises(UserError, match=setting.replace("_", "-")):
        Policy(**{setting: value})  # type: ignore[arg-type]
