"""Prompt lookup changes the number of passes, not the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CountUp, lm_of

from jaxgpt.decoding import Sampler, SamplingParams
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.lookup import DRAFT, draft_tokens
from jaxgpt.decoding.sampler import SamplerState
from jaxgpt.lm import engine
from jaxgpt.lm.sampler import sampler_of

NEW = 30


def generated(
    sampler: Sampler, params: Any, prompt: list[int], key: int, new: int = NEW, steps: int = NEW
) -> SamplerState:
    """Generate up to `new` tokens, `steps` per call."""
    state = engine.start(sampler, params, [prompt], jax.random.split(jax.random.key(key), 1), [new])
    while state.made < new and not state.done_B.all():
        state = engine.run(sampler, params, state, min(steps, new - int(state.made)))
    return state


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(2))
def test_a_draft_is_what_followed_the_last_occurrence(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(30):
        size = int(draw.integers(8, 30))
        ngram = int(draw.integers(1, 4))
        ids = draw.integers(0, 3, size)
        start = int(draw.integers(0, 3))
        length = int(draw.integers(start + ngram, size))
        text = ids[start:length].tolist()
        ends = [i + ngram for i in range(len(text) - ngram) if text[i : i + ngram] == text[-ngram:]]
        ids[:start] = -1
        buffer = TokenBuffer(jnp.asarray(ids[None], jnp.int32), jnp.int32(length))
        draft, found = jax.jit(draft_tokens, static_argnums=(1, 2))(buffer, ngram, 5)
        assert bool(found) == bool(ends)
        if ends:
            follows = text[ends[-1] :]
            assert draft.tolist() == (follows * 5)[:5]


GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.5, top_k=5)
PENALTIES = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, no_repeat_ngram_size=4)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("gpt2", GREEDY),
        pytest.param("llama", SAMPLED, marks=pytest.mark.ci),
        *(pytest.param("gpt2", sampling, marks=pytest.mark.long) for sampling in (SAMPLED, PENALTIES)),
        *(pytest.param("llama", sampling, marks=pytest.mark.long) for sampling in (GREEDY, PENALTIES)),
    ],
)
def test_the_tokens_are_those_of_plain_decoding(
    name: str, sampling: SamplingParams, pytestconfig: pytest.Config
) -> None:
    """Greedy and sampled tokens are equal up to the end of the context: lookup does not change the sampling distribution."""
    lm = lm_of(name, block_size=64)
    draw = np.random.default_rng(0)
    for case in range(50 if pytestconfig.getoption("--long") else 3):
        prompt = draw.integers(0, lm.config.model.vocab_size, draw.integers(9, 16)).tolist()
        new = 64 - len(prompt) + 1
        sampler = sampler_of(lm, sampling, (1, 7) if case % 2 else ())
        plain = engine.new_ids(generated(sampler, lm.params, prompt, case, new, new)).tolist()
        drafted = generated(replace(sampler, lookup=1), lm.params, prompt, case, new, steps=7)
        assert engine.new_ids(drafted)[:, : len(plain[0])].tolist() == plain  # most drafts are rejected


@pytest.mark.parametrize("new", [NEW, 64])  # with and without spare slots
def test_a_text_that_repeats_needs_few_passes(new: int) -> None:
    passes = []
    for lookup in (0, 3):
        sampler = Sampler(CountUp(), SamplingParams(temperature=0), lookup=lookup)
        state = generated(sampler, None, list(range(10)) * 2, 0, new, new)
        assert engine.new_ids(state)[0, :new].tolist() == [i % 10 for i in range(new)]
        passes.append(int(state.cache.passes))
    assert passes[0] == 1 + new
    assert passes[1] <= 1 + -(-new // (DRAFT + 1)) + DRAFT  # no drafts near the end of the buffer
