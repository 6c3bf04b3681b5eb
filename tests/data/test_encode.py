"""Encoding a long text in pieces gives the ids of the complete text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data import opened_source
from jaxgpt.data.opened_source import encode_text
from jaxgpt.data.tokenizers import cuts
from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB, byte_level_bpe
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer

WORDS = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\n  They'll say: \"no\".\n"
WORDS += "\u65e5\u672c\u3001\U0001f600 caf\u00e9\n"
PARTS = [*WORDS.split(" "), " ", "  ", "\n", "\n\n ", "\t"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=60).map("".join).filter(bool)


def prefixed() -> SubwordTokenizer:
    """Return a tokenizer without known cuts: it adds a prefix to each text."""
    from tokenizers import normalizers

    library = byte_level_bpe(BYTE_VOCAB, [])
    library.normalizer = normalizers.Prepend("x")
    return SubwordTokenizer(library)


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
            patch.setattr(opened_source, "TOGETHER", 2)
            found = encode_text(made, text, lambda *step: done.append(step))
        assert found.tolist() == expected
        assert done[-1] == (len(text), len(text))

    check()
