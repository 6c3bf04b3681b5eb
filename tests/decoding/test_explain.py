"""Explanations: probabilities add up, agree with the sampler, and can be replayed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.decoding import SamplingParams, TokenBuffer
from jaxgpt.decoding import sample_token as sample_token_
from jaxgpt.errors import UserError
from jaxgpt.lm.explain import explain_choice

sample_token = jax.jit(sample_token_, static_argnums=4)

PAST = TokenBuffer(jnp.array([[3, 5, 3]]), jnp.int32(3))


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(), marks=pytest.mark.ci),
        SamplingParams(0.7, 20, 0.9, 0.02, 1.3, 2),
        SamplingParams(temperature=0, repetition_penalty=1.1),
        SamplingParams(top_p=0.0),
    ],
)
def test_masses_add_up_and_agree_with_the_sampler(sampling: SamplingParams) -> None:
    for seed in range(3):
        logits = jax.random.normal(jax.random.key(seed), (1, 60)) * 2
        key = jax.random.key(100 + seed)
        told = explain_choice(logits, PAST, sampling, key, seed)
        p = told.probability_V[told.token]
        assert told.probability_V.sum() == pytest.approx(1, abs=1e-12)

        sampled = sample_token(logits, PAST, key[None], jnp.int32(seed), sampling)
        assert told.token == int(sampled.token_B[0])
        assert float(sampled.drawn_log_p_B[0]) == pytest.approx(np.log(p), abs=1e-5)

        left = 60
        for stage in told.stages:
            left -= stage.removed
            assert stage.left == left
            assert 0 <= stage.removed_mass < 1
        if told.uniform is not None:
            assert told.before - 1e-6 <= told.uniform <= told.before + p + 1e-6

        recorded = jax.random.wrap_key_data(jnp.array(told.key, jnp.uint32))
        replayed = explain_choice(logits, PAST, sampling, recorded, seed)
        assert (replayed.token, replayed.uniform) == (told.token, told.uniform)


def keep_none(logits_BV: jax.Array, text: TokenBuffer) -> jax.Array:
    return jnp.full_like(logits_BV, -jnp.inf)


ONLY_3 = jnp.where(jnp.arange(9) == 3, 0.0, -jnp.inf)[None]  # an id of PAST


@pytest.mark.parametrize(
    ("custom", "logits", "message"),
    [
        ((), ONLY_3, "no-repeat n-gram 1 forbids .*ngram_size to 0"),
        ((keep_none,), jnp.zeros((1, 9)), "keep_none forbids every token: filter fewer tokens"),
    ],
)
def test_a_stage_that_forbids_every_token_is_named_with_its_remedy(
    custom: tuple[Any, ...], logits: jax.Array, message: str
) -> None:
    once = SamplingParams(no_repeat_ngram_size=1)
    with pytest.raises(UserError, match=message):
        explain_choice(logits, PAST, once, jax.random.key(0), custom=custom)


P_V = np.array([0.5, 0.25, 0.125, 0.125])


def test_the_mass_removed_by_each_filter() -> None:
    sampling = SamplingParams(temperature=1, top_k=2, top_p=0.6)
    top_k, top_p = explain_choice(jnp.log(P_V)[None], PAST, sampling, jax.random.key(0)).stages
    assert top_k[:3] == ("top-k 2", 2, pytest.approx(0.25))
    # Probabilities 2/3 and 1/3 remain; the first alone reaches 0.6.
    assert top_p[:3] == ("top-p 0.6", 1, pytest.approx(1 / 3))


def test_the_mass_moved_by_the_temperature() -> None:
    sampling = SamplingParams(temperature=0.5)
    [cooler] = explain_choice(jnp.log(P_V)[None], PAST, sampling, jax.random.key(0)).stages
    expected = P_V**2 / (P_V**2).sum()
    assert cooler.removed == 0
    assert cooler.moved_mass == pytest.approx(np.abs(expected - P_V).sum() / 2)
