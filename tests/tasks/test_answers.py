"""Answers of tasks: the text that transformers decodes from the generated ids, up to the first stop string."""

from __future__ import annotations

from typing import Any

import pytest
from pieces import lm_of_pieces

import jaxgpt
from jaxgpt.lm import LM
from jaxgpt.tasks.answers import answer_prompts, as_prompt

PROMPTS = ["ab", " ab a", "\u00e9 ab", "b ab b", "aab", "a b b"]
NEW = 24


@pytest.fixture(scope="module")
def lm() -> LM:
    return lm_of_pieces()


def ids_of(lm: LM, prompt: str) -> list[int]:
    """Return all generated ids, without stop strings."""
    ids = lm.tokenizer.encode_special(prompt).tolist()
    before = [] if ids[:1] == [1] else [1]
    [out] = jaxgpt.generate(lm, [[*before, *ids]], temperature=0, max_new_tokens=NEW)
    return out.ids


def expected(lm: LM, ids: list[int], until: list[str]) -> str:
    """Return the answer that the harness' own model takes from generated ids."""
    text: str = lm.tokenizer.library.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    for stop in until:
        text = text.split(stop)[0]
    return text


def answers(lm: LM, until: list[str]) -> list[str]:
    request: dict[str, Any] = {"until": until, "max_gen_toks": NEW, "do_sample": False, "temperature": 0.0}
    return answer_prompts(lm, [as_prompt(prompt, request) for prompt in PROMPTS])


@pytest.mark.parametrize("until", [[], ["b a"], [" ", "\u00e9"], ["abab", "b"]], ids=str)
def test_answers_are_decoded_without_the_prompt_and_special_tokens(lm: LM, until: list[str]) -> None:
    generated = [ids_of(lm, prompt) for prompt in PROMPTS]
    assert answers(lm, until) == [expected(lm, ids, until) for ids in generated]
    assert any({1, 263, 264, 265} & {*ids} for ids in generated), "special tokens"
    texts = [lm.tokenizer.decode(ids) for ids in generated]
    assert any(text != expected(lm, ids, []) for text, ids in zip(texts, generated, strict=True))


def test_the_name_of_a_special_token_ends_an_answer(lm: LM) -> None:
    """The harness' model does the same for a batch of one request."""
    for name in ("<|im_start|>", "<s>"):
        i = lm.tokenizer.encode_special(name).tolist()[-1]
        found = answers(lm, [name, "Q:"])
        for prompt, answer in zip(PROMPTS, found, strict=True):
            ids = ids_of(lm, prompt)
            before = ids[: ids.index(i)] if i in ids else ids
            assert answer == expected(lm, before, [])
