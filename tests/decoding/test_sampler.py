"""The scan sampler against a naive loop without a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import MODELS, make, random_ids, small

from jaxgpt.decoding import Policy, sample
from jaxgpt.model import GPT, init_cache


def extend_fn(model: GPT):  # type: ignore[no-untyped-def]
    return lambda params, tokens, cache, last: model.apply({"params": params}, tokens, cache, last, method="extend")


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_a_naive_loop(name: str) -> None:
    config = small(name)
    model, params = make(config)
    prompt = random_ids(config, (2, 4))
    keys = jax.random.split(jax.random.key(0), 2)
    cache = init_cache(config, jnp.zeros(2, jnp.int32), 11)
    out = sample(params, prompt, cache, keys, extend_fn=extend_fn(model), policy=Policy(temperature=0), n=8)
    text = prompt
    for _ in range(8):
        text = jnp.concatenate([text, model.apply({"params": params}, text)[:, -1:].argmax(-1).astype(jnp.int32)], 1)
    assert (out == text[:, 4:]).all()


def stub(params, tokens, cache, last):  # type: ignore[no-untyped-def]
    """A model that always wants the next id: no parameters, no cache worth the name."""
    return jax.nn.one_hot((tokens[:, -1:] + 1) % 10, 10) * 100, cache


def test_a_stub_for_a_model() -> None:
    out = sample(
        None, jnp.array([[4], [7]]), (), jax.random.split(jax.random.key(0), 2), extend_fn=stub, policy=Policy(), n=4
    )
    assert out.tolist() == [[5, 6, 7, 8], [8, 9, 0, 1]]


def test_a_row_that_has_ended_stays() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    out = sample(None, jnp.array([[4], [7]]), (), keys, extend_fn=stub, policy=Policy(), n=4, stop_ids=(6,))
    assert out.tolist() == [[5, 6, 6, 6], [8, 9, 0, 1]]


def test_one_token() -> None:
    keys = jax.random.split(jax.random.key(0), 1)
    assert sample(None, jnp.array([[4]]), (), keys, extend_fn=stub, policy=Policy(), n=1).tolist() == [[5]]
