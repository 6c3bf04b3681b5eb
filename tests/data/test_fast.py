"""tiktoken returns the same ids as `tokenizers` for every tokenizer that it supports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import TEXT

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.data.tokenizers.fast import fast_encoder
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.word_patterns import LLAMA3, QWEN, split_by

pytest.importorskip("tiktoken")
WORDS = "naïve Tea  \n\n don't 東京、<|endoftext|>🙂"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe([[TEXT]], 400).to_json())
    return path


def check_fast(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    encode = fast_encoder(tokenizer)
    assert encode is not None
    for text in texts:
        assert encode(text).tolist() == tokenizer.encode(text).tolist()


def test_tiktoken_gives_the_same_ids(tokenizer_path: Path, gpt2_tokenizer: Path) -> None:
    for path in (tokenizer_path, gpt2_tokenizer):
        texts = [
            TEXT,
            WORDS,
            " " * 500 + "a" * 500,
            "\r\n\t x\u3000y\u00a0 \x1c z",
            " " * 10**6 + "a",
        ]
        check_fast(load_tokenizer(path), texts)


@pytest.mark.parametrize("pattern", [LLAMA3, QWEN])
def test_tiktoken_gives_the_same_ids_with_the_words_of_llama_and_qwen(tokenizer_path: Path, pattern: str) -> None:
    value = json.loads(tokenizer_path.read_text())
    level = value["pre_tokenizer"] | {"use_regex": False}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split_by(pattern), level]}
    Path("llama.json").write_text(json.dumps(value))
    texts = [
        TEXT,
        WORDS,
        "12345 x'S  \r\n\r\n y!!\n z",
        " \n " * 9 + "١٢٣٤ ²½ e\u0301",
    ]
    check_fast(load_tokenizer(Path("llama.json")), texts)


@pytest.mark.ci
def test_tiktoken_classifies_every_character_as_tokenizers_does(gpt2_tokenizer: Path) -> None:
    """Words depend only on the class of each character, and each library has its own Unicode table."""
    planes = [*range(0x32000), *range(0x32000, 0x110000, 97)]  # planes above the third have hardly any characters
    characters = [chr(c) for c in planes if not 0xD800 <= c < 0xE000]
    blocks = [characters[i : i + 1000] for i in range(0, len(characters), 1000)]
    check_fast(load_tokenizer(gpt2_tokenizer), ["".join(f"x{c}x1{c}1!{c}! {c}{c} " for c in b) for b in blocks])


def test_tiktoken_does_not_run_a_tokenizer_with_other_merges(tokenizer_path: Path) -> None:
    """With `ignore_merges`, a token encodes to itself regardless of the merges, which proves nothing."""
    value = json.loads(tokenizer_path.read_text())
    assert fast_encoder(load_tokenizer(tokenizer_path)) is not None
    value["model"]["ignore_merges"] = True
    Path("whole.json").write_text(json.dumps(value))
    assert fast_encoder(load_tokenizer(Path("whole.json"))) is None
    value["model"] |= {"ignore_merges": False, "merges": value["model"]["merges"][1:]}  # a token cannot be reached
    Path("other.json").write_text(json.dumps(value))
    assert fast_encoder(load_tokenizer(Path("other.json"))) is None
    value = json.loads(tokenizer_path.read_text())
    value["model"]["vocab"] |= {"\u2581": 1000, "\u2581a": 1001}  # outside the byte alphabet
    value["model"]["merges"].append(["\u2581", "a"])
    Path("more.json").write_text(json.dumps(value))
    assert fast_encoder(load_tokenizer(Path("more.json"))) is None
