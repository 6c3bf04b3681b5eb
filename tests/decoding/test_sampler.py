"""The sampler compared with a naive loop without a cache, and with a stub model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CountUp, every_model, lm_of, make, random_ids, small

from jaxgpt.config import BeamParams
from jaxgpt.decoding import Sampler, SamplingParams, TokenBuffer
from jaxgpt.decoding.beam import BeamSearch
from jaxgpt.decoding.sampler import SamplerState, prefill, slide_steps
from jaxgpt.lm import engine
from jaxgpt.lm.sampler import sampler_of
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import padded_positions

GREEDY = SamplingParams(temperature=0)


def generated(sampler: Sampler, params: Any, rows: list[list[int]], n: int, steps: int = 100) -> np.ndarray:
    """Generate `n` tokens per row, `steps` per call."""
    state = start(sampler, params, rows, n)
    while state.made < n:
        left = n - int(state.made)
        state = engine.run(sampler, params, state, min(steps, left))
    return engine.new_ids(state)[: len(rows)]


def start(sampler: Sampler, params: Any, rows: list[list[int]], n: int) -> SamplerState:
    """Read the prompts, and reserve `n` tokens per row; each row has its own key."""
    keys = jax.random.split(jax.random.key(0), len(rows))
    return engine.start(sampler, params, rows, keys, [n] * len(rows))


@every_model
def test_greedy_equals_a_naive_loop(name: str) -> None:
    lm = lm_of(name)
    model, _ = make(lm.config.model)
    prompt = random_ids(lm.config.model, (2, 4))
    forward = jax.jit(lambda text: model.apply({"params": lm.params}, text))
    text = jnp.zeros((2, 10), jnp.int32).at[:, :4].set(prompt)
    for t in range(4, 10):  # tokens from t on do not affect the logits at t - 1
        text = text.at[:, t].set(forward(text)[:, t - 1].argmax(-1).astype(jnp.int32))
    out = generated(sampler_of(lm, GREEDY), lm.params, prompt.tolist(), 6)
    assert (out == text[:, 4:]).all()


STUB = Sampler(CountUp())


def test_an_ended_row_does_not_change() -> None:
    out = generated(replace(STUB, stop_ids=(6,)), None, [[4], [7]], 4)
    assert out.tolist() == [[5, 6, 6, 6], [8, 9, 0, 1]]


def test_rows_that_fill_the_batch_have_ended() -> None:
    """Three prompts take four rows; all rows have ended once the three prompts have."""
    sampler = replace(STUB, stop_ids=(6,))
    state = start(sampler, None, [[4], [7, 8], [3]], 20)
    assert state.done_B.tolist() == [False, False, False, True]
    state = engine.run(sampler, None, state, 20)
    assert engine.new_ids(state).tolist() == [[5, 6, *[6] * 6], [9, *range(7)], [4, 5, 6, *[6] * 5], [-1] * 8]


@pytest.mark.parametrize("context", [0, 4])
def test_tokens_do_not_depend_on_steps_per_call(context: int) -> None:
    for steps in (1, 2, 9):
        out = generated(replace(STUB, context=context), None, [[4], [7]], 5, steps)
        assert out.tolist() == [[5, 6, 7, 8, 9], [8, 9, 0, 1, 2]]


@pytest.mark.parametrize("sampler", [STUB, replace(STUB, lookup=2), replace(STUB, context=20)])
def test_steps_end_with_the_text_buffer(sampler: Sampler) -> None:
    state = start(sampler, None, [list(range(9))], 3)
    text = engine.run(sampler, None, state, 1000).text
    assert text.ids_BS.tolist() == [[i % 10 for i in range(text.ids_BS.shape[1])]]
    assert text.room == 0


def test_samplers_are_values() -> None:
    """Equal samplers share compiled programs, including samplers of models that are built twice."""
    lm = lm_of("gpt2")
    text = TokenBuffer(jnp.ones((1, 4), jnp.int32), jnp.int32(4))
    keys = jax.random.split(jax.random.key(0), 1)
    traced = jax.jit(chex.assert_max_traces(prefill, n=2), static_argnums=(0, 4))

    def build(temperature: float) -> Sampler:
        copied = lm._replace(config=replace(lm.config))
        return sampler_of(copied, SamplingParams(temperature, top_k=3), (1, 2))

    for temperature in (0.5, 0.7):
        first = build(temperature)
        second = build(temperature)
        assert first == second
        assert hash(first) == hash(second)
        ids_of_first = traced(first, lm.params, text, keys, 8).text.ids_BS
        ids_of_second = traced(second, lm.params, text, keys, 8).text.ids_BS
        np.testing.assert_array_equal(ids_of_first, ids_of_second)


def test_samplers_differ_by_each_of_their_parts() -> None:
    lm = lm_of("gpt2")
    sampler = sampler_of(lm, SamplingParams(0.7, top_k=3), (1, 2))
    changed = [
        replace(sampler, stop_ids=(1,)),
        replace(sampler, sampling=GREEDY),
        replace(sampler, filters=(abs,)),
        replace(sampler, filters=(len,)),
        sampler_of(lm, ops=Ops()),
        STUB,
    ]
    assert len({sampler, *changed}) == 7
    assert replace(sampler, filters=(abs,)) in changed


@pytest.mark.parametrize("window", [3, 5])
def test_the_last_tokens_of_a_buffer_keep_their_positions(window: int) -> None:
    rows = [[0, 1, 2, 3, 4, 5], [-1, -1, -1, -1, 12, 13]]
    text = TokenBuffer(jnp.array([[*row, 7, 7] for row in rows]), jnp.int32(6))
    assert text.tokens_B.tolist() == [6, 2]
    last = text.last(window)
    assert last.ids_BS.tolist() == [row[-window:] for row in rows]
    slots = range(6 - window, 6)
    first_slots = [max(begin, 6 - window) for begin in (0, 4)]  # as if the text began in the window
    positions = padded_positions(last.ids_BS).position_BT
    assert positions.tolist() == [[max(slot - first, -1) for slot in slots] for first in first_slots]
    assert text.last(7).ids_BS.tolist() == [[-1, *row] for row in rows]
    more = text.append(jnp.array([[90, 91], [92, 93]]))
    assert (more.length, more.ids_BS[:, 6:].tolist()) == (8, [[90, 91], [92, 93]])


def test_beams_go_on_past_several_stop_ids() -> None:
    """If the most likely ids all end the text, the search continues with the next most likely."""

    class Same(CountUp):
        def extend(self, tokens: jax.Array, cache: Any) -> Any:
            return jnp.broadcast_to(-jnp.arange(8.0), (len(tokens), 1, 8)), cache

    beam = BeamSearch(Sampler(Same(), SamplingParams(temperature=1), (0, 1, 2, 3)), BeamParams(2), 4)
    text = TokenBuffer(jnp.zeros((1, 1), jnp.int32), jnp.int32(1))

    @jax.jit
    def step() -> jax.Array:
        return beam.step(None, beam.prefill(None, text, jnp.array([3]))).text.ids_BS

    assert step()[:, 1].tolist() == [4, 5]


def test_a_row_slides_alike_after_a_longer_row_has_ended() -> None:
    """The cache lacks the tokens of steps that read the whole context, so it is not used again."""
    config = small("gpt2", n_layer=1, block_size=16, init="torch")
    model, params = make(config)
    sampler = Sampler(model, SamplingParams(temperature=1), context=16)
    keys = jax.random.split(jax.random.key(0), 2)
    read = jax.jit(partial(prefill, sampler), static_argnums=3)
    slide = jax.jit(partial(slide_steps, sampler))
    ids_2P = jnp.array([list(range(16)), [-1] * 13 + [7, 9, 11]], jnp.int32)
    state = read(params, TokenBuffer(ids_2P, jnp.int32(16)), keys, 48)

    once = slide(params, state, jnp.int32(9))
    part = slide(params, state, jnp.int32(4))
    with_ended_row = part._replace(done_B=jnp.array([True, False]))
    twice = slide(params, with_ended_row, jnp.int32(5))
    np.testing.assert_array_equal(once.text.ids_BS[1, 16:26], twice.text.ids_BS[1, 16:26])
