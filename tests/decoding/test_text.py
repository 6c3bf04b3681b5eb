"""Ids to text as they come, however they are cut into portions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import make_tokenizer
from jaxgpt.decoding import TextStream

BYTES = make_tokenizer("byte", "", 0, 0)


def run(ids: list[int], portions: list[int], stops: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(BYTES.decode, max(len(ids), 1), (), stops)
    pieces, at = [], 0
    for size in [*portions, len(ids)]:
        pieces.append(stream.add(ids[at : at + size]))
        at += size
    return pieces, stream


@given(
    st.text(max_size=30).map(lambda t: list(t.encode())) | st.lists(st.integers(0, 255), max_size=40),
    st.lists(st.integers(1, 5), max_size=20),
    st.lists(st.text("ab\u00e9\u20ac", min_size=1, max_size=3), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_portions_do_not_matter(ids: list[int], portions: list[int], stops: list[str]) -> None:
    pieces, stream = run(ids, portions, stops)
    whole, at_once = run(ids, [], stops)
    assert "".join(pieces) == stream.text == "".join(whole)
    assert (stream.ids, stream.finish_reason) == (at_once.ids, at_once.finish_reason)
    assert not any(stop in stream.text for stop in stops)


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 3), max_size=60))
@settings(deadline=None)
def test_never_half_a_character(text: str, portions: list[int]) -> None:
    pieces, _ = run(list(text.encode()), portions, [])
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES.decode, 20, (), ["END"])
    assert [stream.add([ord(c)]) for c in "xEEN"] == ["x", "", "E", ""]
    assert stream.add(b"x") == "ENx"
    assert [stream.add([ord(c)]) for c in "END!"] == ["", "", "", ""]
    assert (stream.text, stream.finish_reason, stream.add(b"more")) == ("xEENx", "stop", "")


def test_the_stop_string_that_is_complete_first_counts() -> None:
    for portions in ([], [1] * 9):
        assert run(list(b"xabcdeab"), portions, ["abcde", "cd"])[1].text == "xab"
