"""The sampler compared with a naive loop without a cache, and with a stub model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from helpers import every_model, make, random_ids, small

from jaxgpt.config import BeamParams
from jaxgpt.decoding import Model, SamplingParams, TokenBuffer
from jaxgpt.decoding.beam import BeamSearch
from jaxgpt.lm import model_functions
from jaxgpt.lm.engine import DecodeSession


def session(model: Model, params: Any, rows: list[list[int]], n: int, **settings: Any) -> DecodeSession:
    keys = jax.random.split(jax.random.key(0), len(rows))
    return DecodeSession(params, rows, keys, [n] * len(rows), model=model, **({"context": 12} | settings))


@every_model
def test_greedy_equals_a_naive_loop(name: str) -> None:
    config = small(name)
    model, params = make(config)
    prompt = random_ids(config, (2, 4))
    functions = model_functions(config, "float32")
    out = session(functions, params, prompt.tolist(), 6, sampling=SamplingParams(temperature=0)).next_tokens(6)
    forward = jax.jit(lambda text: model.apply({"params": params}, text))
    text = jnp.zeros((2, 10), jnp.int32).at[:, :4].set(prompt)
    for t in range(4, 10):  # tokens from t on do not affect the logits at t - 1
        text = text.at[:, t].set(forward(text)[:, t - 1].argmax(-1).astype(jnp.int32))
    assert (out == text[:, 4:]).all()


# A model that always predicts the next id, without parameters and with a trivial cache.
STUB = Model(
    lambda params, tokens, cache, last: (jax.nn.one_hot((tokens[:, -1:] + 1) % 10, 10) * 100, cache),
    lambda start, size: (),
)


def test_a_stub_model() -> None:
    assert session(STUB, None, [[4], [7]], 4, sampling=SamplingParams()).next_tokens(4).tolist() == [
        [5, 6, 7, 8],
        [8, 9, 0, 1],
    ]


def test_an_ended_row_does_not_change() -> None:
    out = session(STUB, None, [[4], [7]], 4, sampling=SamplingParams(), stop_ids=(6,)).next_tokens(4)
    assert out.tolist() == [[5, 6, 6, 6], [8, 9, 0, 1]]


def test_tokens_do_not_depend_on_steps_per_call() -> None:
    parts = session(STUB, None, [[4], [7]], 5, sampling=SamplingParams())
    assert [parts.next_tokens(n).tolist() for n in (1, 2, 2)] == [[[5], [8]], [[6, 7], [9, 0]], [[8, 9], [1, 2]]]


def test_beams_go_on_past_several_stop_ids() -> None:
    """If the most likely ids all end the text, the search continues with the next most likely."""
    logits_V = -jnp.arange(8.0)
    model = Model(
        lambda params, tokens, cache, last: (jnp.broadcast_to(logits_V, (len(tokens), 1, 8)), cache),
        lambda start, size: (),
    )
    beam = BeamSearch(4, model, SamplingParams(temperature=1), BeamParams(2), stop_ids=(0, 1, 2, 3))
    text = TokenBuffer(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.int32(1))

    @jax.jit
    def step() -> jax.Array:
        state = beam.prefill(None, text, jnp.array([3]))
        candidates = beam.candidates(state)
        return beam.step(None, state, candidates, jnp.zeros(candidates.id_BK.shape, bool)).ids_BWS

    assert step()[0, :, 1].tolist() == [4, 5]
