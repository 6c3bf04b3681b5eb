"""Encoding a long text in pieces gives the ids of the complete text, and is cached."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data import Tokens, cuts, token_cache
from jaxgpt.data.text import Text
from jaxgpt.data.token_cache import encode_text
from jaxgpt.data.tokenizer import SubwordTokenizer, Tokenizer, byte_level, byte_vocab
from jaxgpt.data.tokenizer_files import make_tokenizer

WORDS = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\n  They'll say: \"no\".\n"
WORDS += "\u65e5\u672c\u3001\U0001f600 caf\u00e9\n"
PARTS = [*WORDS.split(" "), " ", "  ", "\n", "\n\n ", "\t"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=60).map("".join).filter(bool)
TEXT = Text((WORDS * 30).encode())


def prefixed() -> SubwordTokenizer:
    """Return a tokenizer without known cuts: it adds a prefix to each text."""
    from tokenizers import normalizers

    library = byte_level(byte_vocab(), [])
    library.normalizer = normalizers.Prepend("x")
    return SubwordTokenizer(library)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer whose ids are cached for texts of any size."""
    monkeypatch.setattr(token_cache, "CACHED", 1)
    return make_tokenizer("bpe", WORDS * 20, 300)


def ids_of(tokens: Tokens) -> list[int]:
    return tokens.take(0, len(tokens)).tolist()


def files() -> list[Path]:
    return sorted(Path(os.environ["JAXGPT_CACHE"], "tokens").glob("*.npy"))


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe", "prefixed"])
def test_pieces_give_the_ids_of_the_complete_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=60)
    @given(TEXTS)
    def check(text: str) -> None:
        made = prefixed() if kind == "prefixed" else make_tokenizer(kind, WORDS * 20 if kind == "bpe" else text, 300)
        expected = made.encode(text).tolist()
        done: list[tuple[int, int]] = []
        with monkeypatch.context() as patch:
            patch.setattr(cuts, "PIECE", 7)
            patch.setattr(token_cache, "TOGETHER", 2)
            found = encode_text(made, Text(text.encode()), lambda *step: done.append(step))
        assert ids_of(found) == expected
        assert kind == "byte" or done[-1] == (len(text), len(text))

    check()


def test_a_text_is_encoded_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = encode_text(tokenizer, TEXT)
    encode_text(tokenizer, Text(TEXT.data + b" "))
    encode_text(make_tokenizer("bpe", WORDS[::-1] * 20, 300), TEXT)
    assert len(files()) == 3, "each text and each tokenizer has its file"
    monkeypatch.setattr(token_cache, "_encode", pytest.fail)
    again = encode_text(tokenizer, TEXT)
    assert ids_of(first) == ids_of(again) == tokenizer.encode(TEXT.text).tolist()
    assert isinstance(again.parts[0], np.memmap)
    assert again.parts[0].itemsize == 2


def test_concurrent_readers_encode_once(tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ids_of(encode_text(tokenizer, TEXT)), range(4)))
    assert found == [found[0]] * 4
    assert len(files()) == 1


def test_a_text_is_encoded_once_on_a_full_disk(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    encode = token_cache._encode

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_cache, "write_atomically", full)
    monkeypatch.setattr(token_cache, "_encode", lambda *args: calls.append(1) or encode(*args))
    assert ids_of(encode_text(tokenizer, TEXT)) == tokenizer.encode(TEXT.text).tolist()
    assert len(calls) == 1
    monkeypatch.setattr(token_cache, "locked", full)  # a read-only disk
    assert ids_of(encode_text(tokenizer, TEXT)) == tokenizer.encode(TEXT.text).tolist()
