"""Texts that are encoded in parts: the ids of the parts decode to the whole text, for every kind of tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxgpt.data.chat.records import Pair
from jaxgpt.data.conversations import encode_conversation
from jaxgpt.data.tokenizers.base import Tokenizer as OwnTokenizer
from jaxgpt.data.tokenizers.continuation import encode_continuation
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer

TEXT = "Answer: hello hello, he said. The other's hall is here\n and there (2 of 3)\n\nhell: 10.5 or help me " * 20
SPECIAL = ("<unk>", "<s>", "</s>")


def finished(library: Any, decoder: Any) -> SubwordTokenizer:
    library.decoder = decoder
    library.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return SubwordTokenizer(library)


def sentencepiece(scheme: str, model: str = "bpe") -> SubwordTokenizer:
    """A tokenizer as of Llama 2 (`normalizer`), or with Metaspace."""
    alphabet = sorted(set(TEXT.replace(" ", "\u2581")))
    byte_names = [f"<0x{b:02X}>" for b in range(256)]
    if model == "bpe":
        library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, special_tokens=[*SPECIAL, *byte_names], initial_alphabet=alphabet, show_progress=False
        )
    else:
        library = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=[*SPECIAL], unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
        )
    if scheme == "normalizer":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=model == "unigram")
    library.train_from_iterator([TEXT], trainer)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme != "never":
        parts.append(decoders.Strip(" ", 1, 0))
    return finished(library, decoders.Sequence(parts))


def byte_level_bpe(*, prefix: bool) -> SubwordTokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return finished(library, decoders.ByteLevel())


def wordpiece() -> SubwordTokenizer:
    library = Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=[*SPECIAL], show_progress=False)
    library.train_from_iterator([TEXT], trainer)
    return finished(library, decoders.WordPiece(cleanup=False))


KINDS: dict[str, OwnTokenizer] = {
    "byte": make_tokenizer("byte"),
    "char": make_tokenizer("char", TEXT),
    "bpe": make_tokenizer("bpe", TEXT, 300),
    "byte-level": byte_level_bpe(prefix=False),
    "byte-level with a space": byte_level_bpe(prefix=True),
    "wordpiece": wordpiece(),
    **{f"bpe, {scheme}": sentencepiece(scheme) for scheme in ("normalizer", "first", "always", "never")},
    **{f"unigram, {scheme}": sentencepiece(scheme, "unigram") for scheme in ("normalizer", "first", "always", "never")},
}
PAIRS = [
    ("Answer: ", "hello"),
    ("Answer: h", "ello"),
    ("Answer:", " hello"),
    ("Answer:\n", "hello"),
    ("Answer:", "\nhello"),
    ("Answer: hello\n", "\n hello"),
    ("Answer", "\n\n"),
    ("he", "llo"),
    ("(", "2"),
    ("1", "0.5"),
    ("hello ", " hello"),
    ("", "hello"),
    ("", " hello"),
    ("hello", ""),
]


def check(tokenizer: OwnTokenizer, before: str, text: str) -> None:
    first = tokenizer.encode(before)
    whole = tokenizer.decode(tokenizer.encode(before + text))
    rest = encode_continuation(tokenizer, before, text)
    if "<unk>" in whole:  # WordPiece: an unknown word with known parts
        return
    assert tokenizer.decode([*first, *rest]) == whole
    if tokenizer.decode(first) == before:
        assert encode_continuation(tokenizer, first, text).tolist() == rest.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "text"), PAIRS)
def test_parts_decode_to_the_whole(kind: str, before: str, text: str) -> None:
    check(KINDS[kind], before, text)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_any_text_decode_to_the_whole(kind: str) -> None:
    words = st.lists(st.sampled_from("Answer : hello he llo . \n ( ) 2 10.5 's hall".split(" ")), max_size=5)
    texts = st.builds(lambda parts, sep: sep.join(parts), words, st.sampled_from(["", " ", "  ", "\n"]))

    @settings(max_examples=60)
    @given(texts, texts)
    def split(before: str, text: str) -> None:
        check(KINDS[kind], before, text)

    split()


# Decoding loses the first space of a text, so the concatenation itself is not exact.
STRIPPED = ("bpe, first", "bpe, always", "unigram, first", "unigram, always")
EXACT = [kind for kind in KINDS if kind not in ("wordpiece", "byte-level with a space")]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_a_pair_trains_on_the_concatenation(kind: str, prompt: str, completion: str) -> None:
    tokenizer = KINDS[kind]
    if kind in STRIPPED:
        prompt = prompt or "Answer"
    [(ids, is_target)] = encode_conversation(Pair(prompt, completion), tokenizer, None)
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    text = ids[: len(ids) - len(end)].tolist()
    assert tokenizer.decode(text) == prompt + completion
    assert ids[~is_target].tolist() == tokenizer.encode(prompt).tolist()  # the ids of the prompt at inference


@pytest.mark.parametrize("kind", ["byte", "bpe", "byte-level", "wordpiece", "unigram, first"])
def test_ids_without_a_token_across_the_boundary_are_those_of_the_whole(kind: str) -> None:
    tokenizer = KINDS[kind]
    rest = encode_continuation(tokenizer, "Answer:", " hello")
    assert [*tokenizer.encode("Answer:"), *rest] == tokenizer.encode("Answer: hello").tolist()


def test_a_continuation_of_words_begins_with_a_new_word() -> None:
    words = make_tokenizer("word", "what is this")
    assert encode_continuation(words, "what", "is this").tolist() == words.encode("is this").tolist()
