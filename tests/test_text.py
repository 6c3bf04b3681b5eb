"""Streaming ids to text in chunks of any size, for every kind of tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from folders import llama_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.tokenizers.base import CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm.text import TextStream

BYTES = make_tokenizer("byte", "", 0, 0)
LETTERS = "ab \n\u00e9\u20ac\u4e2d\U0001f600\U0001f389"


def llama() -> Tokenizer:
    from tokenizers import Tokenizer as Library

    return SubwordTokenizer(Library.from_str(json.dumps(llama_tokenizer())))


TOKENIZERS: dict[str, Tokenizer] = {
    "char": CharTokenizer(LETTERS),
    "word": WordTokenizer(["a", "b", "\u00e9\u20ac", "\U0001f600"]),
    "byte": BYTES,
    "bpe": make_tokenizer("bpe", ("ab \u00e9\u20ac \u4e2d\U0001f600 " * 9), 280, 0),
    "llama": llama(),
}


def run(tokenizer: Tokenizer, prompt: list[int], ids: list[int], portions: list[int], stops: list[str]) -> Any:
    stream = TextStream(tokenizer, max(len(ids), 1), (), stops, prompt=prompt)
    pieces = []
    at = 0
    for size in [*portions, len(ids)]:
        pieces.append(stream.add(ids[at : at + size]))
        at += size
    return pieces, stream


def ids_of(name: str, data: st.DataObject) -> list[int]:
    """Draw the ids of a text, or arbitrary ids."""
    tokenizer = TOKENIZERS[name]
    if name != "word" and data.draw(st.booleans(), label="text"):
        return tokenizer.encode(data.draw(st.text(LETTERS, max_size=12))).tolist()
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    if name == "llama":  # valid or invalid UTF-8 bytes among words
        any_id = st.sampled_from([3 + byte for byte in b"\xf0\x9f\x98\x80\xe4\n\x80a"] + [259, 260, 262, 263, 264])
    return data.draw(st.lists(any_id, max_size=16))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
@settings(max_examples=150)
def test_streamed_text_equals_decoding_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = ids_of(name, data)
    cut = data.draw(st.integers(0, len(ids)), label="cut")
    portions = data.draw(st.lists(st.integers(1, 4), max_size=16))
    stops = data.draw(st.lists(st.text(LETTERS, min_size=1, max_size=2), max_size=2))
    for prompt, new in ((ids[:cut], ids[cut:]), ([], ids)):
        pieces, stream = run(tokenizer, prompt, new, portions, stops)
        whole, at_once = run(tokenizer, prompt, new, [], stops)
        assert "".join(pieces) == stream.text == "".join(whole)
        assert (stream.ids, stream.finish_reason) == (at_once.ids, at_once.finish_reason)
        assert not any(stop in stream.text for stop in stops)
        before, after = (tokenizer.decode(part) if part else "" for part in (prompt, ids if prompt else new))
        if not stops and after.startswith(before):
            assert before + stream.text == after
        if stops:
            free = run(tokenizer, prompt, new, [], [])[1].text
            ends = min(((free.find(s) + len(s), free.find(s)) for s in stops if s in free), default=(0, len(free)))[1]
            assert stream.text == free[:ends]


@pytest.mark.parametrize(
    ("prompt", "text", "pieces"),
    [
        ("", "\U0001f600\U0001f389", ["\U0001f600\U0001f389"]),
        ("a b", " a \u4e2d", [" a", " ", "\u4e2d"]),
        ("a \U0001f600", "\U0001f389b", ["\U0001f389b"]),
    ],
)
def test_incomplete_characters_are_held_back(prompt: str, text: str, pieces: list[str]) -> None:
    """An incomplete character changes how the bytes before it decode, and emitted text cannot be taken back."""
    tokenizer = TOKENIZERS["llama"]
    assert tokenizer.byte_ids == set(range(3, 259))
    before = tokenizer.encode(prompt).tolist()
    new = tokenizer.encode(prompt + text).tolist()[len(before) :]
    given, stream = run(tokenizer, before if prompt else [], new, [1] * len(new), [])
    assert "".join(given) == stream.text == text
    assert [piece for piece in given if piece] == pieces


def test_a_possible_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES, 20, (), ["END"])
    assert [stream.add([ord(c)]) for c in "xEEN"] == ["x", "", "E", ""]
    assert stream.add(b"x") == "ENx"
    assert [stream.add([ord(c)]) for c in "END!"] == ["", "", "", ""]
    assert (stream.text, stream.finish_reason, stream.add(b"more")) == ("xEENx", "stop", "")


def test_the_first_complete_stop_string_counts() -> None:
    for portions in ([], [1] * 9):
        assert run(BYTES, [], list(b"xabcdeab"), portions, ["abcde", "cd"])[1].text == "xab"


def test_a_value_that_is_no_id_ends_the_text() -> None:
    stream = TextStream(BYTES, 20)
    assert stream.add([97, 98, -1, 99]) == "ab"
    assert (stream.ids, stream.finish_reason) == ([97, 98], "exhausted")
    with pytest.raises(UserError, match="logits are NaN"):
        TextStream(BYTES, 20).add([97, -2])
