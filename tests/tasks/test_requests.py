"""Requests of tasks: choices, complete texts and answers are the log probabilities and texts of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lm_of
from hypothesis import given
from hypothesis import strategies as st

import jaxgpt
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.model import GPT
from jaxgpt.tasks.answers import answer_prompts, as_prompt
from jaxgpt.tasks.requests import Continuation, answer_choices, answer_texts, prefix_id, windows
from jaxgpt.train.loss import token_losses


@pytest.fixture(scope="module")
def lm() -> LM:
    return lm_of("llama", block_size=16)


@pytest.fixture(scope="module")
def of_bytes() -> LM:
    """Return a model of bytes: its texts begin after a newline."""
    lm = lm_of("llama", block_size=16, vocab_size=256)
    return lm._replace(tokenizer=make_tokenizer("byte", "", 0, 256))


def request(**settings: Any) -> dict[str, Any]:
    """Return a request for an answer, as the harness normalizes it."""
    return {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0} | settings


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12))
def test_windows_predict_each_id_once_from_the_ids_before_it(ids: list[int], length: int) -> None:
    sequence = [99, *ids]
    predicted = 0
    for window in windows(ids, 99, length):
        read = (window.context + window.ids)[:-1]
        assert len(read) == min(length, predicted + len(window.ids)), "as many earlier ids as fit"
        before = predicted + 1  # ids of the sequence before the predicted ones
        assert window.context == sequence[before - len(window.context) : before]
        assert window.ids == ids[predicted : predicted + len(window.ids)]
        predicted += len(window.ids)
    assert predicted == len(ids)


def test_a_text_within_the_context_has_its_training_loss(of_bytes: LM) -> None:
    lm = of_bytes
    ids = np.random.default_rng(0).integers(0, 17, 16).tolist()
    [log_p] = answer_texts(lm, [ids])
    losses = jax.jit(partial(token_losses, GPT(lm.config.model).apply))
    losses_BT, _ = losses(lm.params, jnp.array([[prefix_id(lm), *ids]]))
    np.testing.assert_allclose(log_p, -float(losses_BT.sum()), rtol=1e-5)


def test_long_texts_add_the_scores_of_their_windows(of_bytes: LM) -> None:
    lm = of_bytes
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 17, n).tolist() for n in (40, 3, 17)]
    expected = []
    for ids in texts:
        scores = [jaxgpt.score(lm, [w.context], [w.ids])[0] for w in windows(ids, prefix_id(lm), 16)]
        expected.append(sum(score.log_p.sum() for score in scores))
    np.testing.assert_allclose(answer_texts(lm, texts), expected, rtol=1e-5)


def test_a_context_that_does_not_fit_loses_its_beginning(lm: LM) -> None:
    long = Continuation([5] * 30 + [1, 2, 3], [4, 6])
    kept = Continuation([5] * 12 + [1, 2, 3], [4, 6])  # 16 inputs and the last id
    (log_p, _), (expected, _) = answer_choices(lm, [long, kept])
    assert log_p == pytest.approx(expected, abs=1e-5)


def test_a_choice_that_greedy_decoding_produces_is_marked(lm: LM) -> None:
    [out] = jaxgpt.generate(lm, [[1, 2, 3]], temperature=0, max_new_tokens=4)
    changed = [(out.ids[0] + 1) % 17, *out.ids[1:]]
    (_, is_greedy), (_, is_changed_greedy) = answer_choices(
        lm, [Continuation([1, 2, 3], out.ids), Continuation([1, 2, 3], changed)]
    )
    assert is_greedy
    assert not is_changed_greedy


def test_a_choice_longer_than_the_context_is_rejected(lm: LM) -> None:
    with pytest.raises(UserError, match="a choice of the task has 17 tokens, and the model's context is 16"):
        answer_choices(lm, [Continuation([1], [2] * 17)])


def test_answers_are_greedy_texts_whatever_their_batch(lm: LM) -> None:
    texts = ["1 2 3", "4", "7 7 7 7 7 7", "2 1"]
    prompts = [as_prompt(text, request(max_gen_toks=3 + n % 2)) for n, text in enumerate(texts)]
    answers = answer_prompts(lm, prompts)
    for n, text in enumerate(texts):
        [out] = jaxgpt.generate(lm, text, temperature=0, max_new_tokens=3 + n % 2)
        assert answers[n].split() == out.text.split()


def test_answers_end_before_a_stop_string(lm: LM) -> None:
    [out] = jaxgpt.generate(lm, "1 2 3", temperature=0, max_new_tokens=6)
    third = out.text.split()[2]
    [answer] = answer_prompts(lm, [as_prompt("1 2 3", request(max_gen_toks=6, until=["", third]))])
    assert third not in answer
    assert out.text.lstrip().startswith(answer), "decoded without the prompt"


def test_a_long_prompt_keeps_room_for_its_answer(lm: LM) -> None:
    text = " ".join(map(str, range(17))) + " 3 1 4"
    [answer] = answer_prompts(lm, [as_prompt(text, request(max_gen_toks=13))])
    [out] = jaxgpt.generate(lm, "3 1 4", temperature=0, max_new_tokens=13)
    assert answer.split() == out.text.split()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": 16}, "the task generates up to 16 tokens, and the model's context is 16"),
        ({"num_beams": 4}, "the task sets num_beams 4 in generation_kwargs, which jaxgpt does not support"),
    ],
    ids=str,
)
def test_settings_that_the_model_cannot_follow_are_rejected(lm: LM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        answer_prompts(lm, [as_prompt("1", request(**settings))])
