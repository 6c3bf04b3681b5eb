"""Log probabilities: the sampler, `score` and the training loss compute the same number for the same token."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import llama_tokenizer
from helpers import lm_of
from hypothesis import given
from hypothesis import strategies as st
from test_lm import tiny
from tokenizers import Tokenizer

import jaxgpt
from jaxgpt.config import MeshConfig
from jaxgpt.data.tokenizer import SubwordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.kernels import best
from jaxgpt.lm import LM
from jaxgpt.lm.score import _shared_rows, _Text
from jaxgpt.lm.weights import Precision, quantize
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import shardings
from jaxgpt.train.loss import token_losses

PROMPTS = ["1 2 3 1 2", "4", "16 0 9"]


@pytest.fixture(scope="module")
def lm() -> LM:
    return lm_of("gpt2", block_size=32)


def on_mesh(lm: LM, **axes: int) -> LM:
    mesh = make_mesh(MeshConfig(**{"data": 1, **axes}))
    boxed = jax.eval_shape(lambda: boxed_params(GPT(lm.config.model), 0))
    return lm._replace(params=jax.device_put(lm.params, shardings(boxed, lm.config.model, mesh)))


def in_bfloat16(lm: LM) -> LM:
    """Return the model with activations and cache in bfloat16."""
    return lm._replace(config=replace(lm.config, train=replace(lm.config.train, compute_dtype="bfloat16")))


def check_generations_equal_scores(lm: LM, prompts: Any, atol: float = 1e-5, **settings: Any) -> None:
    outs = jaxgpt.generate(lm, prompts, key=3, **{"max_new_tokens": 9} | settings)
    whole = [out.ids + [out.stop_id] * (out.stop_id is not None) for out in outs]
    scores = jaxgpt.score(lm, prompts, whole, batch_tokens=40)
    for out, score in zip(outs, scores, strict=True):
        assert len(out.log_p) == len(score.ids)
        np.testing.assert_allclose(out.log_p, score.log_p, atol=atol)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 0},
        {"stop_ids": (2, 5, 11), "temperature": 2.0},
        {"overflow": "slide"},
    ],
    ids=str,
)
def test_the_sampler_and_score_agree_for_any_sampling_parameters(lm: LM, settings: dict[str, Any]) -> None:
    check_generations_equal_scores(lm, PROMPTS, **settings)


@pytest.mark.parametrize("name", ["gemma", "llama", pytest.param("neox", marks=pytest.mark.ci)])
def test_the_sampler_and_score_agree_for_other_models(name: str) -> None:
    check_generations_equal_scores(lm_of(name, block_size=32), PROMPTS)


def test_prompt_lookup_and_score_agree(lm: LM) -> None:
    check_generations_equal_scores(lm, ["1 2 3 1 2 3 1 2"], lookup=2, temperature=0.5)


@pytest.mark.parametrize("precision", ["int8", pytest.param("bfloat16", marks=pytest.mark.ci)])
def test_the_sampler_and_score_agree_with_stored_weights(lm: LM, precision: Precision) -> None:
    check_generations_equal_scores(lm._replace(params=quantize(lm.params, lm.config.model, precision)), PROMPTS)


@pytest.mark.ci
@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_the_sampler_and_score_agree_on_a_mesh(lm: LM, axes: dict[str, int]) -> None:
    check_generations_equal_scores(on_mesh(lm, **axes), [*PROMPTS, "7 7"])


def test_the_sum_of_the_scores_is_the_training_loss(lm: LM) -> None:
    ids = np.random.default_rng(0).integers(0, 17, 20).tolist()
    [score] = jaxgpt.score(lm, [ids[:1]], [ids[1:]])
    model = GPT(lm.config.model, best(lm.config))
    losses_BT, _ = jax.jit(partial(token_losses, model.apply))(lm.params, jnp.array([ids]))
    np.testing.assert_allclose(score.log_p, -losses_BT[0], atol=1e-5)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=7), st.sampled_from([1, 20, 1000])
)
def test_scores_do_not_depend_on_the_other_texts_of_a_batch(lengths: list[tuple[int, int]], batch_tokens: int) -> None:
    lm = lm_of("gpt2", block_size=32)
    rng = np.random.default_rng(len(lengths))
    contexts = [rng.integers(0, 17, n).tolist() for n, _ in lengths]
    continuations = [rng.integers(0, 17, n).tolist() for _, n in lengths]
    together = jaxgpt.score(lm, contexts, continuations, batch_tokens=batch_tokens)
    for context, ids, score in zip(contexts, continuations, together, strict=True):
        [alone] = jaxgpt.score(lm, [context], [ids])
        assert score.ids == ids
        np.testing.assert_allclose(score.log_p, alone.log_p, atol=1e-5)


def test_texts_that_begin_alike_are_computed_once_and_score_as_alone(lm: LM) -> None:
    question = [3, 1, 4, 1, 5]
    # Answers of one token, an answer that goes on, a question that is a part of another, and a different one.
    contexts = [question, question, question, question[:2], [2, 7]]
    answers = [[9], [2], [9, 6, 5], [4, 1, 5, 9], [9]]
    texts = [_Text(context, ids) for context, ids in zip(contexts, answers, strict=True)]
    assert sorted(row.inputs for row in _shared_rows(texts)) == [[2, 7], [*question, 9, 6]]

    together = jaxgpt.score(lm, contexts, answers)
    for context, ids, score in zip(contexts, answers, together, strict=True):
        [alone] = jaxgpt.score(lm, [context], [ids])
        np.testing.assert_allclose(score.log_p, alone.log_p, atol=1e-5)
        np.testing.assert_array_equal(score.is_best, alone.is_best)


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=12))
def test_every_text_is_in_one_row_that_begins_with_its_inputs(sequences: list[list[int]]) -> None:
    texts = [_Text(ids[:1], ids[1:]) for ids in sequences]
    rows = _shared_rows(texts)
    assert sorted(n for row in rows for n in row.texts) == list(range(len(texts)))
    for row in rows:
        for n in row.texts:
            assert row.inputs[: len(texts[n].inputs)] == texts[n].inputs
    distinct = {tuple(row.inputs) for row in rows}
    assert len(distinct) == len(rows)


def test_progress_counts_texts_and_may_end_the_computation(lm: LM) -> None:
    counts: list[tuple[int, int]] = []
    jaxgpt.score(lm, ["1 2", "3", "4"], ["5", "6", "7"], batch_tokens=16, progress=lambda *count: counts.append(count))
    assert counts == [(1, 3), (2, 3), (3, 3)]

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        jaxgpt.score(lm, "1", "2", progress=stop)


def test_greedy_decoding_chooses_what_is_best(lm: LM) -> None:
    [out] = jaxgpt.generate(lm, "1 2 3", temperature=0, max_new_tokens=6)
    [score] = jaxgpt.score(lm, "1 2 3", [out.ids])
    assert score.is_best.all()
    worse = [(i + 1) % 17 for i in out.ids[:1]]
    assert not jaxgpt.score(lm, "1 2 3", [worse])[0].is_best[0]


def test_a_token_across_the_border_of_the_context_is_encoded_alone() -> None:
    lm = lm_of("gpt2", vocab_size=300)
    from jaxgpt.data.tokenizer_files import train_bpe

    lm = lm._replace(tokenizer=train_bpe([["hello " * 50]], 262))
    assert len(lm.tokenizer.encode("hello")) < 5
    [score] = jaxgpt.score(lm, "he", "llo")
    assert lm.tokenizer.decode(score.ids) == "llo"


@pytest.mark.parametrize(
    ("contexts", "continuations", "message"),
    [
        (["1", "2"], ["1"], "2 contexts and 1 continuations: pass one continuation per context"),
        ("1", "", "a continuation has no tokens: pass a text or at least one id"),
        ("1", [[0] * 40], "a text has 1 tokens of context and 40 of continuation, and the model reads at most 32"),
        ("1", [[17]], "the id at position 0"),
    ],
)
def test_invalid_texts_raise_one_line(lm: LM, contexts: Any, continuations: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        jaxgpt.score(lm, contexts, continuations)


def test_models_with_rope_score_beyond_their_context() -> None:
    lm = lm_of("llama", block_size=8)
    [score] = jaxgpt.score(lm, "1", [[2] * 20])
    assert np.isfinite(score.log_p).all()


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_sampler_and_score_agree_in_bfloat16(lm: LM, precision: Precision) -> None:
    """Both round the same activations; a program that sums in a different order may round some of them differently."""
    half = in_bfloat16(lm)._replace(params=quantize(lm.params, lm.config.model, precision))
    check_generations_equal_scores(half, PROMPTS, atol=2**-5, temperature=0.8, top_k=8, top_p=0.9)


def test_bfloat16_scores_are_float32(lm: LM) -> None:
    half = in_bfloat16(lm)
    [score] = jaxgpt.score(half, "1 2", [[3, 4]])
    [exact] = jaxgpt.score(lm, "1 2", [[3, 4]])
    assert score.log_p.dtype == np.float32
    np.testing.assert_allclose(score.log_p, exact.log_p, atol=0.1)


@pytest.mark.parametrize(
    ("context", "continuation", "text"),
    [("ab ", "ab", "ab ab"), ("a", "b", "ab"), ("a", " b", "a b"), ("", "ab", "ab")],
)
def test_a_continuation_has_no_space_and_no_start_of_its_own(context: str, continuation: str, text: str) -> None:
    """The tokenizer prepends `<s>` and a space to each text, as in Llama 2."""
    library = Tokenizer.from_str(json.dumps(llama_tokenizer(("<|x|>",))))
    own = SubwordTokenizer(library)
    [found] = jaxgpt.score(tiny(own), context, continuation)
    assert own.decode([*own.encode(context), *found.ids]) == text
    assert found.ids[0] not in own.bos_ids
    if context:
        [same] = jaxgpt.score(tiny(own), [[1, *own.encode(context).tolist()]], [found.ids])
        np.testing.assert_allclose(same.log_p, found.log_p, atol=1e-6)
