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
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.kernels import best
from jaxgpt.lm import LM
from jaxgpt.lm.score import _rows_of
from jaxgpt.lm.score_batch import ContinuedText, target_scores
from jaxgpt.lm.tree import Ancestors
from jaxgpt.lm.weights import Precision, quantize
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.ops.attention import Positions
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


QUESTION = [3, 1, 4, 1, 5]
# Answers of one token, answers that go on, a question that is a part of another, and different ones.
CONTEXTS = [QUESTION, QUESTION, QUESTION, QUESTION[:2], [2, 7], QUESTION, [2]]
ANSWERS = [[9], [2], [9, 6, 5], [4, 1, 5, 9], [9], [8, 7, 9, 3], [7, 8, 8]]


def check_scores_equal_the_scores_alone(lm: LM, contexts: Any, answers: Any) -> None:
    together = jaxgpt.score(lm, contexts, answers)
    for context, ids, score in zip(contexts, answers, together, strict=True):
        [alone] = jaxgpt.score(lm, [context], [ids])
        np.testing.assert_allclose(score.log_p, alone.log_p, atol=1e-5)
        np.testing.assert_array_equal(score.is_best, alone.is_best)


def test_a_common_beginning_is_computed_once(lm: LM) -> None:
    texts = [ContinuedText(context, ids) for context, ids in zip(CONTEXTS, ANSWERS, strict=True)]
    assert sorted(row.ids for row in _rows_of(lm, texts)) == [[2, 7, 8], [*QUESTION, 8, 7, 9, 9, 6]]


@pytest.mark.parametrize("name", ["gpt2", "gemma", pytest.param("llama", marks=pytest.mark.ci)])
def test_texts_with_a_common_beginning_score_as_alone(name: str) -> None:
    """Test learned positions, sliding windows shorter than the texts, and RoPE."""
    check_scores_equal_the_scores_alone(lm_of(name, block_size=32), CONTEXTS, ANSWERS)


@pytest.mark.ci
@pytest.mark.parametrize("axes", [{"data": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_texts_with_a_common_beginning_score_as_alone_on_a_mesh(lm: LM, axes: dict[str, int]) -> None:
    check_scores_equal_the_scores_alone(on_mesh(lm, **axes), CONTEXTS, ANSWERS)


def random_texts(seed: int) -> list[list[int]]:
    """Return up to 12 texts of 3 to 7 ids; most begin alike."""
    rng = np.random.default_rng(seed)
    return [[0, *rng.integers(0, 3, rng.integers(2, 7)).tolist()] for _ in range(rng.integers(1, 13))]


def test_every_text_is_a_path_of_one_tree() -> None:
    lm = lm_of("llama")
    for seed in range(100):
        texts = [ContinuedText(ids[:1], ids[1:]) for ids in random_texts(seed)]
        [row] = _rows_of(lm, texts)
        assert sorted(row.paths) == list(range(len(texts)))
        assert len(row.ids) == len({tuple(text.inputs[:end]) for text in texts for end in range(1, 7)})
        for n, path in row.paths.items():
            assert [row.ids[node] for node in path] == texts[n].inputs
            assert [row.position[node] for node in path] == list(range(len(path)))


def test_a_token_attends_to_the_tokens_before_it_in_its_text(lm: LM) -> None:
    texts = [ContinuedText(ids[:1], ids[1:]) for ids in random_texts(0)]
    [row] = _rows_of(lm, texts)
    mask_TS = Ancestors(Positions(jnp.array([row.position])), end_BT=jnp.array([row.end])).mask()[0, 0]
    for path in row.paths.values():
        for n, node in enumerate(path):
            assert np.flatnonzero(mask_TS[node]).tolist() == path[: n + 1]


def test_texts_share_no_row_if_the_scores_of_attention_are_more_work(lm: LM) -> None:
    """A common token of texts of 100 tokens saves less than the scores between them cost; 50 common tokens save more."""
    long = lm._replace(config=replace(lm.config, model=replace(lm.config.model, positions="rope")))
    for common, rows in ((1, 2), (50, 1)):
        beginning = [4] * common
        texts = [ContinuedText([*beginning, *[n] * (100 - common)], [1]) for n in (2, 3)]
        assert len(_rows_of(long, texts)) == rows


def test_a_row_is_within_the_table_of_learned_positions(lm: LM) -> None:
    texts = [ContinuedText([1] * 20, [n] * 8) for n in (2, 3, 4)]
    assert [len(row.ids) for row in _rows_of(lm, texts)] == [27, 27, 27]


def test_other_classes_of_models_compute_texts_separately(lm: LM) -> None:
    """A block of their own need not use `ops.attend`."""
    own = lm._replace(model=type("Own", (GPT,), {}))
    texts = [ContinuedText(context, ids) for context, ids in zip(CONTEXTS, ANSWERS, strict=True)]
    rows = _rows_of(own, texts)
    assert not any(row.branches for row in rows)
    assert sorted(row.ids for row in rows) == [[2, 7, 8], [*QUESTION, 8, 7, 9], [*QUESTION, 9, 6]]
    check_scores_equal_the_scores_alone(own, CONTEXTS, ANSWERS)


def test_the_first_of_equal_logits_is_best() -> None:
    logits = jnp.array([[[0.0, 5.0, 5.0, -jnp.inf]] * 4])
    log_p, is_best = target_scores(logits, jnp.array([[0, 1, 2, -1]]))
    assert is_best.tolist() == [[False, True, False, False]]
    np.testing.assert_allclose(log_p[0, :3], jax.nn.log_softmax(logits[0, 0])[:3], rtol=1e-6)


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
    from jaxgpt.data.tokenizers.bpe import train_bpe

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
