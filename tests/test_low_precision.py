"""Generation with bfloat16 and int8 weights: every way to decode draws what the dequantized weights give in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lm_of

import jaxgpt
from jaxgpt.config import SamplingParams
from jaxgpt.decoding import TokenBuffer
from jaxgpt.decoding.sampling import sample_token
from jaxgpt.lm import LM, Generation
from jaxgpt.lm.weights import Precision, dequantize, quantize
from jaxgpt.model import GPT

NEW = 16
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 8, "top_p": 0.9}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4], [16, 0, 9, 9, 9]]

every_precision = pytest.mark.parametrize("precision", ["int8", pytest.param("bfloat16", marks=pytest.mark.ci)])


def model_of(name: str) -> LM:
    return lm_of(name, block_size=32, vocab_size=60)


def stored(lm: LM, precision: Precision) -> LM:
    return lm._replace(params=quantize(lm.params, lm.config.model, precision))


def dequantized(lm: LM) -> LM:
    """Return the model with the rounded weights as float32 arrays."""
    return lm._replace(params=dequantize(lm.params))


def keys() -> jax.Array:
    return jax.random.split(jax.random.key(7), len(PROMPTS))


def check_equal(found: list[Generation], expected: list[Generation]) -> None:
    assert [out.ids for out in found] == [out.ids for out in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.log_p, other.log_p, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.ci)])
@every_precision
def test_draws_equal_those_of_dequantized_weights_without_a_cache(name: str, precision: Precision) -> None:
    """The naive loop reads the whole text at each step, with the definitions of the operations."""
    lm = stored(model_of(name), precision)
    outs = jaxgpt.generate(lm, PROMPTS, key=keys(), max_new_tokens=NEW, **SAMPLING)

    rounded = dequantized(lm)
    model = GPT(rounded.config.model)
    forward = jax.jit(lambda ids_1T: model.apply({"params": rounded.params}, ids_1T))
    sample = jax.jit(partial(sample_token, sampling=SamplingParams(**SAMPLING)))
    for out, prompt, key in zip(outs, PROMPTS, keys(), strict=True):
        P = len(prompt)
        ids_1T = jnp.zeros((1, 32), jnp.int32).at[0, :P].set(jnp.array(prompt))
        log_p = []
        for i in range(NEW):
            text = TokenBuffer(ids_1T, jnp.int32(P + i))
            logits_1TV = forward(ids_1T)
            sampled = sample(logits_1TV[:, P + i - 1], text, key[None], jnp.int32(i))
            ids_1T = ids_1T.at[:, P + i].set(sampled.token_B)
            log_p.append(float(sampled.log_p_B[0]))
        assert out.ids == ids_1T[0, P : P + NEW].tolist()
        np.testing.assert_allclose(out.log_p, log_p, atol=1e-5)
    assert len({tuple(out.ids) for out in outs}) == len(PROMPTS)


@every_precision
def test_each_row_equals_its_prompt_alone(precision: Precision) -> None:
    lm = stored(model_of("gpt2"), precision)
    together = jaxgpt.generate(lm, PROMPTS, key=keys(), max_new_tokens=NEW, **SAMPLING)
    alone = []
    for prompt, key in zip(PROMPTS, keys(), strict=True):
        alone += jaxgpt.generate(lm, [prompt], key=key[None], max_new_tokens=NEW, **SAMPLING)
    check_equal(together, alone)


@every_precision
def test_prompt_lookup_equals_plain_decoding(precision: Precision) -> None:
    lm = stored(model_of("gpt2"), precision)
    settings: dict[str, Any] = {"key": 3, "max_new_tokens": 24, **SAMPLING}
    plain = jaxgpt.generate(lm, PROMPTS[0], **settings)
    check_equal(jaxgpt.generate(lm, PROMPTS[0], lookup=1, **settings), plain)


@every_precision
def test_beams_equal_those_of_dequantized_weights(precision: Precision) -> None:
    """The score of a beam is the sum of the log probabilities of its tokens, divided by their number."""
    lm = stored(model_of("gpt2"), precision)
    settings: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    found = jaxgpt.generate(lm, PROMPTS, **settings)
    expected = jaxgpt.generate(dequantized(lm), PROMPTS, **settings)
    assert [out.ids for out in found] == [out.ids for out in expected]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    scores = jaxgpt.score(lm, prompts, [out.ids for out in found])
    means = [score.log_p.mean() for score in scores]
    np.testing.assert_allclose([out.score for out in found], means, atol=1e-5)
