"""Tokenizers: the public ids, round trips, special tokens as text, long texts in pieces."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.config import UserError
from jaxgpt.data.tokenizer import SubwordTokenizer, _byte_level, _byte_vocab, cut, load_tokenizer, make_tokenizer

DATA = Path(os.environ.get("JAXGPT_TEST_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
GPT2 = DATA / "gpt2-bpe"
WORDS = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\nThey'll say: \"no\".\n" * 20
ODD = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\r\t\x1c\x85\u00a0!a1'\u2019")), max_size=60)


def gpt2():
    if not GPT2.is_dir():
        pytest.skip("GPT-2's tables are not here")
    return load_tokenizer(GPT2)


def trained():
    return make_tokenizer("bpe", WORDS, 280, 0)


KINDS = {"byte": lambda: make_tokenizer("byte", "", 0, 0), "bpe": trained, "gpt2": gpt2}


def test_public_ids():
    ids = gpt2().encode("Recurrent Neural Network will change the")
    assert ids.tolist() == [6690, 6657, 47986, 7311, 481, 1487, 262]
    assert ids.dtype == np.int32
    assert gpt2().vocab_size == 50257
    assert gpt2().eos_id == 50256


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind):
    tokenizer = KINDS[kind]()

    @settings(max_examples=150, deadline=None)
    @given(ODD)
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_text_are_text(kind):
    tokenizer = KINDS[kind]()
    text = "a<|endoftext|>b"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_json_round_trip(kind, tmp_path):
    tokenizer = KINDS[kind]()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    again = load_tokenizer(tmp_path)
    assert again.encode(WORDS).tolist() == tokenizer.encode(WORDS).tolist()
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)


def test_bpe_has_the_size_asked_for_and_shortens():
    tokenizer = trained()
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode(WORDS)) < len(WORDS) / 1.5
    with pytest.raises(UserError, match="257"):
        make_tokenizer("bpe", WORDS, 100, 0)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def pattern_tokenizer(pattern):
    """A BPE of bytes whose merges are those of the trained one, over another pattern."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_str(trained().to_json())
    splitters = pre_tokenizers
    if pattern:
        tokenizer.pre_tokenizer = splitters.Sequence(
            [splitters.Split(Regex(pattern), "isolated"), splitters.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    return tokenizer


@pytest.mark.parametrize("pattern", ["", LLAMA3], ids=["gpt2", "llama3"])
def test_pieces_encode_as_the_whole(pattern):
    """Compared are the words that the pattern finds: what BPE does within one depends on nothing else."""
    splitter = pattern_tokenizer(pattern).pre_tokenizer

    def words(text):
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    @settings(max_examples=400, deadline=None)
    @given(ODD)
    def check(text):
        pieces = cut(text, size=3)
        assert "".join(pieces) == text
        assert [w for piece in pieces for w in words(piece)] == words(text)

    check()


def test_long_texts_go_in_pieces_only_where_that_changes_nothing():
    from tokenizers import pre_tokenizers

    text = WORDS * 200
    tokenizer = trained()
    assert len(cut(text)) > 1
    assert tokenizer.encode(text).tolist() == tokenizer._tokenizer.encode(text).ids
    # One that puts a mark before every text would put it before every piece.
    marked = _byte_level(_byte_vocab() | {"▁": 256}, [])
    marked.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    marked = SubwordTokenizer(marked)
    assert marked.encode(text).tolist() == marked._tokenizer.encode(text).ids


def test_characters_and_words():
    chars = make_tokenizer("char", "héllo\n", 0, 0)
    assert chars.decode(chars.encode("hello\n".replace("e", "é"))) == "héllo\n"
    with pytest.raises(UserError, match="'x'"):
        chars.encode("x")
    words = make_tokenizer("word", "what is <EOS> this", 0, 0)
    assert words.encode("this is what").tolist() == [3, 1, 0]
    assert words.eos_id == 2
