"""Hidden states and attention maps: their laws, and that they cost nothing unless captured."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make

import jaxgpt
from jaxgpt.config import Config, ModelConfig
from jaxgpt.data.tokenizer_files import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm import Generation
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params
from jaxgpt.model.scan import stack_layers
from jaxgpt.study.run import forward

B, T, N, L, V = 3, 11, 2, 3, 13


@pytest.fixture(scope="module")
def lm():
    config = ModelConfig(vocab_size=V, block_size=16, n_layer=L, n_head=N, n_embd=8, init_std=0.5)
    return jaxgpt.LM(Config(model=config), make(config)[1], make_tokenizer("ids", "", 0, V))


def test_laws(lm):
    ids = np.random.default_rng(0).integers(0, V, (B, T))
    seen = jaxgpt.study.capture(lm, ids)
    assert [h.shape for h in seen.hidden] == [(B, T, 8)] * (L + 1)
    assert [a.shape for a in seen.attentions] == [(B, N, T, T)] * L
    for a in seen.attentions:
        np.testing.assert_allclose(a.sum(-1), 1.0, atol=1e-6)
        assert (np.triu(np.asarray(a), 1) == 0).all()
    model = GPT(lm.config.model)
    plain = jax.jit(model.apply)({"params": lm.params}, jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(seen.logits, plain, atol=1e-5)
    # The last hidden state is after the final norm, so only the head remains.
    head = model.apply({"params": lm.params}, seen.hidden[-1], method="head")
    np.testing.assert_allclose(seen.logits, head, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("positions", "settings"),
    [
        ("rope", {"top_k": 5, "key": jax.random.key(3)}),
        pytest.param("learned", {"num_beams": 2}, marks=pytest.mark.long),
        pytest.param("learned", {"temperature": 0, "max_new_tokens": 1}, marks=pytest.mark.long),
        pytest.param("learned", {"temperature": 0}, marks=pytest.mark.long),
        pytest.param("rope", {"num_beams": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_captured_generation_equals_a_full_pass(lm, positions, settings):
    config = dataclasses.replace(lm.config.model, positions=positions, n_kv_head=1)
    lm = lm._replace(config=Config(model=config), params=make(config)[1])
    settings = {"max_new_tokens": 7} | settings
    generated = jaxgpt.study.capture_generation(lm, [1, 2, 3, 4], **settings)
    [generation] = jaxgpt.generate(lm, [[1, 2, 3, 4]], **settings)
    assert generated.generation == generation
    assert generated.ids == [1, 2, 3, 4, *generation.ids]
    full = jaxgpt.study.capture(lm, [generated.ids])
    assert jax.tree.structure(generated.captured) == jax.tree.structure(full)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), generated.captured, full)
    for weights in generated.captured.attentions:
        assert (np.triu(np.asarray(weights), 1) == 0).all()


@pytest.mark.ci
def test_a_captured_generation_may_end_past_the_context(lm):
    """And have stacked weights."""
    stacked = lm._replace(params=stack_layers(lm.params))
    out = jaxgpt.study.capture_generation(stacked, [1, 2, 3, 4], max_new_tokens=13, temperature=0)
    assert len(out.ids) == 17
    assert out.captured.logits.shape == (1, 16, V)
    assert np.argmax(out.captured.logits[0, 3:], -1).tolist() == out.generation.ids


def test_a_text_whose_beginning_was_dropped_is_not_captured(lm, monkeypatch):
    # `jaxgpt.study.capture` itself is the function.
    module = sys.modules["jaxgpt.study.capture"]
    monkeypatch.setattr(module, "generate", lambda *_, **settings: [Generation("", [1] * 14, "length")])
    with pytest.raises(UserError, match="17 tokens exceed the context length of 16, so overflow slide dropped"):
        jaxgpt.study.capture_generation(lm, [1, 2, 3, 4], max_new_tokens=14, overflow="slide", temperature=0)


def results(text):
    """Return the result shapes of a compiled program, from the root of its entry computation."""
    return re.search(r"ENTRY.*?ROOT [^=]+= (.*?)\n", text, re.S).group(1)


def test_without_capture_no_attention_map_is_returned(lm):
    config, shape = lm.config.model, f"f32[{B},{N},{T},{T}]"
    params, ids = abstract_params(config), jax.ShapeDtypeStruct((B, T), jnp.int32)

    def hlo(taps):
        return jax.jit(lambda p, i: forward(lm.config, p, i, taps)).lower(params, ids).compile().as_text()

    assert shape in results(hlo(("h.0.attn.pattern",)))
    without = results(hlo(()))
    assert shape not in without
    assert without.startswith(f"f32[{B},{T},{V}]")


@pytest.mark.ci
def test_gradients_are_the_same_with_capture(lm):
    ids = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32)
    model = GPT(lm.config.model)
    plain = jax.jit(jax.grad(lambda p: model.apply({"params": p}, ids).sum()))(lm.params)
    seen = jax.jit(jax.grad(lambda p: jaxgpt.study.capture(lm._replace(params=p), ids).logits.sum()))(lm.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, seen)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, V]], f"id {V}"),
        ([[-1, 0]], "id -1"),
        ([[0] * 17], "17 tokens"),
        ([0, 1], "shape"),
        ([[]], "shape"),
        ([[0.5]], "shape"),
    ],
)
def test_bad_ids_raise_before_jit(lm, ids, message):
    with pytest.raises(UserError, match=message):
        jaxgpt.study.capture(lm, ids)
