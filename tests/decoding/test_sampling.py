"""Filters and sampling parameters: allowed tokens and their frequencies."""

from __future__ import annotations

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_cpu

from jaxgpt.decoding import SamplingParams, TokenBuffer, filters
from jaxgpt.decoding import sample_token as sample_token_
from jaxgpt.decoding import warp as warp_
from jaxgpt.decoding.sampling import row_uniform
from jaxgpt.errors import UserError

sample_token = jax.jit(sample_token_, static_argnums=(4, 5))
warp = jax.jit(warp_, static_argnums=(2, 3))


def buffer(*rows: list[int], size: int = 0) -> TokenBuffer:
    """Make a buffer of left-padded rows with `size` empty slots after them."""
    longest = max(map(len, rows))
    ids = np.full((len(rows), longest + size), 7, np.int32)  # tokens after a row must not count
    for out, row in zip(ids, rows, strict=True):
        out[:longest] = [-1] * (longest - len(row)) + row
    return TokenBuffer(jnp.asarray(ids), jnp.int32(longest))


def kept(logits_BV: jax.Array) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(logits_BV)]


ANY = buffer([0])
EVERY_FILTER = SamplingParams(
    temperature=1.3, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.3, no_repeat_ngram_size=1
)


def test_repetition_penalty_divides_positive_logits_and_multiplies_others() -> None:
    logits = jnp.array([[1.0, -1.0, 2.0, -2.0, 0.0]])
    out = warp(logits, buffer([0, 1, 0], size=3), SamplingParams(temperature=1, repetition_penalty=2.0))
    np.testing.assert_array_equal(out[0], [0.5, -2.0, 2.0, -2.0, 0.0])


def test_top_k_keeps_ties_with_the_kth() -> None:
    logits = jnp.array([[3.0, 2.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    assert kept(filters.keep_top_k(logits, 2)) == [[0, 1, 2], [2, 3]]
    assert kept(filters.keep_top_k(logits, 9)) == [[0, 1, 2, 3]] * 2


def test_top_k_does_not_sort_the_vocabulary() -> None:
    """XLA may compile a partial sort with sliced values to a full sort, which is 70 times slower."""
    program = jax.jit(lambda logits: filters.keep_top_k(logits, 200)).lower(jnp.zeros((1, 50_257))).compile()
    assert " sort(" not in program.as_text()


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    cases = (
        (0.0, [0]),
        (0.4, [0]),
        (0.6, [0, 1]),
        (0.8, [0, 1, 3]),  # the largest id among equal probabilities
        (0.9, [0, 1, 2, 3]),
    )
    for p, expected in cases:
        assert kept(filters.keep_top_p(logits, p)) == [expected], p


@pytest.mark.parametrize(("p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.8, 4)])
def test_top_p_of_equal_probabilities(p: float, count: int) -> None:
    """Each of four tokens has a probability of exactly 1/4."""
    [ids] = kept(filters.keep_top_p(jnp.zeros((1, 4)), p))
    assert len(ids) == count


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(p: float) -> None:
    rng = np.random.default_rng(0)
    mixed = np.array([[0.01], [1.0], [5.0]])
    for spread in (0.01, 1.0, 5.0, mixed):  # flat: the largest logits do not reach p; peaked: they do
        logits = rng.normal(0, spread, (3, 6000)).astype(np.float32)
        out = kept(filters.keep_top_p(jnp.asarray(logits), p))
        for row, ids in zip(logits.astype(np.float64), out, strict=True):
            order = np.argsort(-row)
            weight = np.exp(row - row.max())
            cumulative = np.cumsum(weight[order] / weight.sum())
            size = int(np.searchsorted(cumulative, p)) + 1
            assert abs(len(ids) - size) <= 1  # the boundary itself depends on the last bit
            assert set(order[: size - 1].tolist()) <= set(ids) <= set(order[: size + 1].tolist())


@on_cpu
def test_xla_still_sorts_integers_faster() -> None:
    """Otherwise `keep_top_p` can sort the probabilities instead of their bits."""
    probability = jax.nn.softmax(jax.random.normal(jax.random.key(0), (50_257,)))
    sort = jax.jit(jnp.sort)

    def seconds(x: jax.Array) -> float:
        return min(timeit.repeat(lambda: sort(x).block_until_ready(), number=1, repeat=6))

    assert seconds(probability) > 2 * seconds(jax.lax.bitcast_convert_type(probability, jnp.int32))


def test_min_p_is_relative_to_the_top_probability() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    assert kept(filters.keep_min_p(logits, 0.25)) == [[0, 1, 2]]
    assert kept(filters.keep_min_p(logits, 1.0)) == [[0]]


@pytest.mark.parametrize(
    ("sampling", "vocabulary"),
    [
        (SamplingParams(), 700),  # above and below the size at which sampling splits the vocabulary into slices
        (EVERY_FILTER, 30),
        pytest.param(EVERY_FILTER, 700, marks=pytest.mark.long),
        pytest.param(SamplingParams(temperature=0.7), 30, marks=pytest.mark.long),
    ],
)
def test_frequencies_match_the_probabilities(sampling: SamplingParams, vocabulary: int) -> None:
    draws = 10_000
    logits = jax.random.normal(jax.random.key(1), (1, vocabulary)) * 2
    past = buffer([3, 5, 3])
    warped = warp(logits, past, sampling)
    probability = np.asarray(jax.nn.softmax(warped), np.float64)[0]
    keys = jax.random.split(jax.random.key(2), draws)

    @jax.jit
    def draw() -> jax.Array:
        """Draw a token for each of many rows with the same logits, but different keys."""
        rows = jnp.broadcast_to(warped, (draws, vocabulary))
        return filters.inverse_cdf_sample(rows, row_uniform(keys, 0))

    seen = np.bincount(np.asarray(draw()), minlength=vocabulary)
    assert seen[probability == 0].sum() == 0

    # Tokens that are expected less than 5 times are one class.
    expected = probability * draws
    rare = expected < 5
    observed = np.append(seen[~rare], seen[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed = observed[wanted > 0]
    wanted = wanted[wanted > 0]

    # Chi-square with f degrees has mean f and variance 2f; the seed is fixed, so this is not flaky.
    chi2 = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert abs(chi2 - freedom) < 4 * np.sqrt(2 * freedom), (chi2, freedom)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = jax.random.normal(jax.random.key(0), (3, 400))
    keys = jax.random.split(jax.random.key(1), 3)
    sampling = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2)
    rows = [[1, 2, 3], [4], [1, 1, 1]]
    together = sample_token(logits, buffer(*rows), keys, jnp.int32(3), sampling)
    for i, row in enumerate(rows):
        alone = sample_token(logits[i : i + 1], buffer(row), keys[i : i + 1], jnp.int32(3), sampling)
        for one, each in zip(alone, together, strict=True):
            np.testing.assert_allclose(one[0], each[i], atol=1e-6)


def test_temperature_zero_takes_the_first_of_the_top_tokens() -> None:
    logits = jnp.array([[1.0, 5.0, 5.0], [-jnp.inf, -jnp.inf, 0.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    greedy = SamplingParams(temperature=0)
    rows = buffer([0], [0])
    assert sample_token(logits, rows, keys, jnp.int32(0), greedy).token_B.tolist() == [1, 2]
    assert kept(warp(logits, rows, greedy)) == [[1], [2]]


def remove_above_one(logits_BV: jax.Array, text: TokenBuffer) -> jax.Array:
    return jnp.where(logits_BV > 1, -jnp.inf, logits_BV)


EACH_FILTER = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=0.001),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(no_repeat_ngram_size=2),
    EVERY_FILTER,
]
# Parameters, and custom filters.
CASES: list[tuple[SamplingParams, Any]] = [(sampling, ()) for sampling in EACH_FILTER]
CASES.append((SamplingParams(temperature=0.5), (remove_above_one,)))


def near_group_ends(warped_V: np.ndarray) -> np.ndarray:
    """Return random numbers near the cumulative probability at the ends of groups of 256 ids, where sums are rounded."""
    weight_V = np.exp(warped_V.astype(np.float64) - warped_V.max())
    weight_G = np.add.reduceat(weight_V, np.arange(0, len(weight_V), 256))
    end_G = np.cumsum(weight_G) / weight_V.sum()

    # Random numbers are multiples of 2^-23 below 1; the last one is the largest float below 1.
    near_Gn = np.round(end_G[:, None] * 2**23) + np.arange(-8, 9)
    uniform = near_Gn.clip(0, 2**23 - 1) / 2**23
    return np.float32(np.append(uniform, np.nextafter(np.float32(1), np.float32(0))))


@pytest.mark.parametrize(
    "V", [4096, pytest.param(300, marks=pytest.mark.long), pytest.param(50_257, marks=pytest.mark.long)]
)
def test_a_removed_token_is_never_drawn(V: int) -> None:
    @jax.jit
    def draw(warped_V: jax.Array, uniform: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(warped_V, (len(uniform), V))
        return filters.inverse_cdf_sample(rows, uniform)

    for seed, (sampling, custom) in enumerate(CASES[4:]):
        rng = np.random.default_rng(seed)
        text = buffer(rng.integers(0, V, V // 3).tolist())
        logits_1V = jnp.asarray(rng.normal(0, 3, (1, V)), jnp.float32)
        warped_V = np.asarray(warp(logits_1V, text, sampling, custom))[0]
        drawn = np.asarray(draw(warped_V, near_group_ends(warped_V)))
        assert np.isfinite(warped_V[drawn]).all(), sampling


@pytest.mark.parametrize(("sampling", "custom"), CASES, ids=range(len(CASES)))
def test_log_probabilities_are_of_the_logits_and_of_the_filtered_logits(sampling: SamplingParams, custom: Any) -> None:
    logits = 2 * jax.random.normal(jax.random.key(0), (4, 40))
    rows = buffer([3, 5, 3], [4], [5, 6], [1, 1, 1, 1], size=2)
    keys = jax.random.split(jax.random.key(1), 4)
    token_B, log_p_B, drawn_log_p_B = sample_token(logits, rows, keys, jnp.int32(3), sampling, custom)
    assert drawn_log_p_B.dtype == log_p_B.dtype == jnp.float32

    row = jnp.arange(4)
    log_p_BV = jax.nn.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(log_p_B, log_p_BV[row, token_B], atol=1e-5)

    drawn_log_p_BV = jax.nn.log_softmax(warp(logits, rows, sampling, custom), axis=-1)
    np.testing.assert_allclose(drawn_log_p_B, drawn_log_p_BV[row, token_B], atol=1e-5)
    has_one_token = sampling.temperature in (0, 0.001)
    assert (drawn_log_p_B == 0).all() == has_one_token


def test_custom_filters_apply_before_the_temperature() -> None:
    warped = warp(jnp.array([[0.6, 1.2, 0.1]]), ANY, SamplingParams(temperature=0.5), (remove_above_one,))
    np.testing.assert_allclose(warped, [[0, -np.inf, -1]], rtol=1e-6)  # relative to the largest remaining logit


def test_draws_at_any_temperature_equal_float64() -> None:
    small = [1e-300, 1e-45, 1e-40, 1e-38, 1e-20, 1e-11, 1e-9, 1e-5, 0.009]
    temperatures = [*small, 0.01, 0.8, 30.0, 1e10, 1e30, 1e39, 1e300]
    rng = np.random.default_rng(0)
    logits = rng.uniform(-90, 90, (64, 300)).astype(np.float32)
    logits[:32] = -80 - rng.uniform(0, 1e-3, (32, 300)).astype(np.float32)  # close together, far from 0
    logits[::2, 7] = -np.inf
    logits[3, 5:9] = [89.99999, 90.0, 90.0, 89.99999]  # neighboring floats, and equal ones
    number = rng.uniform(0, 1, 64).astype(np.float32)

    @jax.jit
    def draw(logits: jax.Array, number: jax.Array) -> jax.Array:
        params = [SamplingParams(temperature=t) for t in temperatures]
        return jnp.stack([filters.inverse_cdf_sample(warp_(logits, ANY, p), number) for p in params])

    for temperature, ids in zip(temperatures, np.asarray(draw(logits, number)), strict=True):
        wide = logits.astype(np.float64)
        weight = np.exp(np.maximum((wide - wide.max(-1, keepdims=True)) / temperature, -800))
        weight[np.isneginf(logits)] = 0
        ends = np.cumsum(weight, -1) / weight.sum(-1, keepdims=True)
        for row, token in enumerate(ids):
            assert 0 <= token < 300, (temperature, row)
            begin = ends[row, token - 1] if token else 0.0
            # float32 sums of 300 numbers: boundaries may differ in their last bits, and ratios at temperature 0.01 by 1e-3.
            slack = 2e-3 if temperature < 1 else 1e-5
            assert begin - slack <= number[row] <= ends[row, token] + slack, (temperature, row)
            assert weight[row, token] > 0, (temperature, row)
            if temperature <= 1e-9:
                assert logits[row, token] == logits[row].max(), (temperature, row)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_token_and_nan_are_distinguished_from_ids(temperature: float) -> None:
    logits = jnp.array([[0.0, 1.0, 2.0], [-jnp.inf] * 3, [0.0, jnp.nan, 1.0], [jnp.inf, 0.0, 0.0]])
    params = SamplingParams(temperature=temperature, top_k=2, top_p=0.9)
    keys = jax.random.split(jax.random.key(0), 4)
    ids = sample_token(logits, buffer([0], [0], [0], [0]), keys, jnp.int32(0), params).token_B
    assert ids.tolist() == [ids[0], -1, -2, 0]
    assert ids[0] >= 0


def test_ngrams_equal_a_plain_loop() -> None:
    sizes = (1, 2, 3, 4, 7, 30)
    rng = np.random.default_rng(0)

    @jax.jit
    def forbid(ids: jax.Array, length: jax.Array) -> list[jax.Array]:
        text = TokenBuffer(ids, length)
        return [filters.forbid_repeated_ngrams(jnp.zeros((4, 5)), text, n) for n in sizes]

    for length in (1, 3, 12, 16):
        ids = rng.integers(0, rng.integers(1, 4), (4, 16)).astype(np.int32)
        start = np.minimum(rng.integers(0, 8, 4), length - 1)
        ids = np.where(np.arange(16) < start[:, None], -1, ids).astype(np.int32)
        for n, out in zip(sizes, forbid(ids, np.int32(length)), strict=True):
            for row in range(4):
                text = ids[row, start[row] : length].tolist()
                found = np.flatnonzero(np.isneginf(out[row])).tolist()
                assert set(found) == repeating(text, n), (n, text)


def repeating(text: list[int], n: int) -> set[int]:
    """Return the ids that would repeat an n-gram of a text."""
    if len(text) < n - 1:
        return set()
    grams = [text[i : i + n] for i in range(len(text) - n + 1)]
    suffix = text[len(text) - n + 1 :]
    return {gram[-1] for gram in grams if gram[:-1] == suffix}


def test_program_size_does_not_depend_on_ngram_length() -> None:
    text = buffer([0], size=5000)

    def program(n: int) -> str:
        sampling = SamplingParams(no_repeat_ngram_size=n)
        return str(jax.make_jaxpr(lambda logits: warp_(logits, text, sampling))(jnp.zeros((1, 9))))

    assert len(program(3000)) < 1.05 * len(program(3))
    unchanged = warp_(jnp.zeros((1, 9)), text, SamplingParams(temperature=1, no_repeat_ngram_size=2**24))
    assert np.isfinite(unchanged).all()


@pytest.mark.parametrize("value", [True, "1", None, [1], 1j, 1.5, np.float64(2), np.array([1]), 10**400, -1], ids=str)
def test_settings_of_the_wrong_type_raise(value: object) -> None:
    names = ["top_k", "no_repeat_ngram_size"]
    if not isinstance(value, float):
        names.append("temperature")
    for name in names:
        with pytest.raises(UserError, match=f"{name} must be"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
