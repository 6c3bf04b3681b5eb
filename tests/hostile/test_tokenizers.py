"""Tokenizers that would give wrong ids, and tokenizers that the library reads differently from jaxgpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import TEXT

from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

CHAR = json.loads(make_tokenizer("char", "abc", 0, 0).to_json())
BYTES = json.loads(make_tokenizer("byte", "", 0, 0).to_json())


def changed(base: dict[str, Any], model: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """Replace parts of a tokenizer.json, and parts of its model."""
    return base | parts | {"model": base["model"] | (model or {})}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


TOKENIZERS = {
    "one id twice": (changed(CHAR, model={"vocab": {"a": 0, "b": 0}}), "two tokens have the same id"),
    "no ids": (changed(CHAR, model={"vocab": {}}), "it has no tokens"),
    "a far id": (changed(BYTES, model={"vocab": {"a": 2**32 - 1}}), "id 4294967295 is not below 16777216"),
    "true for an id": (changed(CHAR, model={"vocab": {"a": False, "b": True}}), "cannot process this file"),
    "a list": ([], "it has no vocabulary"),
    "of another type": ({"model": 5}, "it has no vocabulary"),
    "merges of nothing": (changed(BYTES, model={"merges": [["xyz", "q"]]}), "cannot process this file"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_would_give_wrong_ids_raise(case: str, tmp_path: Path) -> None:
    value, message = TOKENIZERS[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("vocab", [{"b": 0, "a": 1}, {"a": 0, "b": 2}, {"ab": 0, "a": 1}])
def test_other_characters_are_left_to_the_library(vocab: dict[str, int], tmp_path: Path) -> None:
    """Tokens in a different order, with gaps between ids, or of several characters are left to the library."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(CHAR, model={"vocab": vocab})))
    tokenizer = load_tokenizer(tmp_path)
    assert type(tokenizer) is SubwordTokenizer
    assert tokenizer.encode("a").tolist() == [vocab["a"]]


def test_ids_with_holes_are_below_the_vocabulary_size(tmp_path: Path) -> None:
    vocab = BYTES["model"]["vocab"] | {"zz": 999}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(BYTES, model={"vocab": vocab})))
    assert load_tokenizer(tmp_path).vocab_size == 1000


def test_the_dropout_of_bpe_is_ignored(tmp_path: Path) -> None:
    plain = make_tokenizer("bpe", TEXT, 300, 0)
    with_dropout = changed(json.loads(plain.to_json()), model={"dropout": 0.5})
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_dropout))
    assert load_tokenizer(tmp_path).encode(TEXT).tolist() == plain.encode(TEXT).tolist()


def test_a_text_is_not_split_where_an_unknown_pattern_finds_other_words(tmp_path: Path) -> None:
    base = json.loads(make_tokenizer("bpe", TEXT, 300, 0).to_json())
    every_7 = {"type": "Sequence", "pretokenizers": [pattern(r"[\s\S]{7}"), BYTES["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(base, pre_tokenizer=every_7)))
    tokenizer: Any = load_tokenizer(tmp_path)
    long = TEXT * 8
    assert tokenizer.encode(long).tolist() == tokenizer.library.encode(long).ids
