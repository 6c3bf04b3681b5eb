"""Tokenizers: published ids, round trips, special tokens in text, splitting of long texts."""

import json
import re

import numpy as np
import pytest
from folders import llama_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxgpt.data.tokenizers import cuts
from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB, byte_level_bpe
from jaxgpt.data.tokenizers.cuts import cut, known_cuts
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.data.tokenizers.word_patterns import LLAMA3, QWEN
from jaxgpt.errors import UserError

WORDS = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\nThey'll say: \"no\".\n" * 20
CHARACTERS = " \n\r\t\x1c\x85\u00a0!a1'\u2019\u4e00\u3042\uff0c\u3002\u0301"
# st.characters() reads the Unicode table, which takes seconds in every process.
ANY = st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr)
ODD = st.text(st.one_of(ANY, st.sampled_from(CHARACTERS)), max_size=60)


def trained():
    return make_tokenizer("bpe", WORDS, 280)


def test_published_ids(gpt2_tokenizer):
    gpt2 = load_tokenizer(gpt2_tokenizer)
    ids = gpt2.encode("Recurrent Neural Network will change the")
    assert ids.tolist() == [6690, 6657, 47986, 7311, 481, 1487, 262]
    assert ids.dtype == np.int32
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_round_trips(kind, tmp_path, request):
    """Round trips of any text, of a special token's name (plain text), and of tokenizer.json."""
    if kind == "gpt2":
        tokenizer = load_tokenizer(request.getfixturevalue("gpt2_tokenizer"))
    else:
        tokenizer = make_tokenizer(kind, WORDS, 280)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    again = load_tokenizer(tmp_path)
    assert again.encode(WORDS).tolist() == tokenizer.encode(WORDS).tolist()
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    ids = tokenizer.encode("a<|endoftext|>b").tolist()
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"

    @settings(max_examples=150)
    @given(ODD)
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_bpe_has_the_requested_size():
    tokenizer = trained()
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode(WORDS)) < len(WORDS) / 1.5
    with pytest.raises(UserError, match="257"):
        make_tokenizer("bpe", WORDS, 100)


def pattern_tokenizer(pattern):
    """A byte-level BPE with the trained merges and a different pattern."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = Tokenizer.from_str(trained().to_json())
    splitters = pre_tokenizers
    if pattern.startswith("digits"):
        digits = splitters.Digits(individual_digits=pattern == "digits")
        tokenizer.pre_tokenizer = splitters.Sequence([digits, splitters.ByteLevel(add_prefix_space=False)])
    elif pattern:
        tokenizer.pre_tokenizer = splitters.Sequence(
            [splitters.Split(Regex(pattern), "isolated"), splitters.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    return tokenizer


@pytest.mark.parametrize(
    "pattern", ["", LLAMA3, QWEN, "digits", "digits in groups"], ids=["gpt2", "llama3", "qwen2", "smollm2", "digits"]
)
def test_known_splits_keep_words(pattern, monkeypatch):
    """Compare the words found by the pattern; BPE encodes each word separately."""
    tokenizer = pattern_tokenizer(pattern)
    found = known_cuts(json.loads(tokenizer.to_str()))
    assert found is not None
    monkeypatch.setattr(cuts, "PIECE", 1)

    def words(text):
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    @settings(max_examples=300)
    @given(ODD)
    def check(text):
        parts = cut(text, found)
        assert "".join(parts) == text
        assert [w for part in parts for w in words(part)] == words(text)

    check()


def test_the_librarys_whitespace_is_pythons():
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    every = "".join(map(chr, (*range(0x3100), 0xFEFF, 0xE0020)))
    dark = {c for word, _ in Split(Regex(r"\s+"), "removed").pre_tokenize_str(every) for c in word}
    assert 20 < len(set(every) - dark) <= len(set(re.findall(r"\s", every)))
    assert set(every) - dark <= set(re.findall(r"\s", every))


def test_texts_are_split_only_where_ids_do_not_change(monkeypatch):
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    monkeypatch.setattr(cuts, "PIECE", 1000)
    text = WORDS * 4
    tokenizer = trained()
    assert len(cut(text, tokenizer.cuts)) > 1
    assert tokenizer.encode(text).tolist() == tokenizer.library.encode(text).ids
    for name, part in (
        ("pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first")),
        ("normalizer", normalizers.Prepend("\u2581")),
        ("normalizer", normalizers.Lowercase()),
        ("pre_tokenizer", pre_tokenizers.Split(Regex(r"\s{3}|\S+"), "isolated")),
    ):
        library = byte_level_bpe(BYTE_VOCAB | {"\u2581": 256}, [])
        library.decoder = decoders.Fuse()
        setattr(library, name, part)
        made = SubwordTokenizer(library)
        assert cut(text, made.cuts) == [text], "no cut is known"
        assert made.encode(text).tolist() == made.library.encode(text).ids


def test_characters_and_words():
    chars = make_tokenizer("char", "héllo\n")
    assert chars.decode(chars.encode("hello\n".replace("e", "é"))) == "héllo\n"
    with pytest.raises(UserError, match="'x'"):
        chars.encode("x")
    words = make_tokenizer("word", "what is <EOS> this")
    assert words.encode("this is what").tolist() == [3, 1, 0]
    assert words.eos_id == 2


def test_bytes_that_are_not_text_are_named() -> None:
    bpe = make_tokenizer("bpe", "a text", 300)
    for encode in (bpe.encode, bpe.encode_special, make_tokenizer("byte").encode):
        with pytest.raises(UserError, match=r"the text has '.udcff' at position 1, which is not a valid character"):
            encode("a\udcff")


def test_names_of_tokens_are_text_and_incomplete_bytes() -> None:
    bpe = SubwordTokenizer(byte_level_bpe(BYTE_VOCAB | {"e\u00c3": 256}, []))
    for tokenizer in (bpe, make_tokenizer("byte")):
        assert [tokenizer.name(i) for i in (0x65, 0xC3)] == ["e", "<0xC3>"]
    assert bpe.name(256) == "e<0xC3>"


def test_names_of_tokens_that_are_text_are_their_text() -> None:
    """The character é is also GPT-2's character for the byte 0xE9."""
    llama = SubwordTokenizer(Tokenizer.from_str(json.dumps(llama_tokenizer())))
    ids = [llama.library.token_to_id(token) for token in ("\u00e9", "ab", "<0xC3>")]
    assert [llama.name(i) for i in ids] == ["\u00e9", "ab", "<0xC3>"]


@pytest.mark.parametrize("kind", ["word", "char"])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_ids_outside_the_words_are_one_line(kind: str, wrong: int) -> None:
    tokenizer = make_tokenizer(kind, "a b c d" if kind == "word" else "abcd")
    with pytest.raises(UserError, match=f"id {wrong} is outside the vocabulary of 4"):
        tokenizer.decode([0, wrong])


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_negative_ids_are_one_line(kind: str) -> None:
    with pytest.raises(UserError, match="negative"):
        make_tokenizer(kind, "a text", 300).decode([0, -1])
