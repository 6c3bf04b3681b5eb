"""The interface of tokenizers, and the tokenizers of bytes, words and characters."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB, byte_level_bpe, text_with_byte_names
from jaxgpt.data.tokenizers.cuts import ANYWHERE, WHITESPACE, Cuts
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError

END_OF_TEXT = "<|endoftext|>"  # end-of-text token of GPT-2, which other programs write into texts
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<EOS>", "</s>")  # usual end-of-text tokens, in order of precedence

Ids = Sequence[int] | np.ndarray  # token ids, as arguments


class Tokenizer(ABC):
    """The interface of a tokenizer; the defaults are for tokenizers without special tokens."""

    vocab_size: int  # V, the largest id plus 1
    special: SpecialTokens = SpecialTokens()  # special tokens from tokenizer or model files; empty: no such files
    separator: str = ""  # separator between two texts; non-empty: decoding does not restore white space
    cuts: Cuts = ANYWHERE  # pattern of places to cut a text without changing its ids; None: no known place
    byte_ids: Collection[int] = ()  # ids of tokens <0x00> to <0xFF>, if decoding joins these bytes to characters
    unknown_id: int | None = None  # id of all text outside the vocabulary; None: such text has no id

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """Ids to prepend to a text."""
        return ()

    def after_bos(self, ids: list[int]) -> list[int]:
        """Return ids after `bos_ids`, unless the ids begin with `bos_ids`."""
        before = list(self.bos_ids)
        return ids if ids[: len(before)] == before else before + ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        special = tuple(i for i in self.special.end_ids if i < self.vocab_size)
        return special or self._usual_end()

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document in training data, or None."""
        return next(iter(self.end_ids), None)

    def _usual_end(self) -> tuple[int, ...]:
        """Return the id of the first usual end-of-text token in the vocabulary as a tuple, or ()."""
        return ()

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Encode a text to int32 ids. Names of special tokens, such as `<|endoftext|>`, are encoded as ordinary text.

        Raises:
            UserError: if the text has an unpaired surrogate, or characters or words outside the vocabulary.
        """

    def encode_special(self, text: str) -> np.ndarray:
        """Encode a text to int32 ids; the names of special tokens become the tokens' ids."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """Decode ids to text.

        Raises:
            UserError: if an id is negative or, for words and characters, outside the vocabulary.
        """

    def settled(self, ids: list[int]) -> list[int]:
        """Return the ids without trailing byte tokens, because the next byte can change their text."""
        end = len(ids)
        while end > 0 and ids[end - 1] in self.byte_ids:
            end -= 1
        return ids[:end]

    def has_text(self, vocab_size: int) -> np.ndarray:
        """Return a boolean mask `[vocab_size]` of the ids that have a text, unlike padding ids."""
        return np.arange(vocab_size) < self.vocab_size

    def name(self, i: int) -> str:
        """Return a name of a token: its text, with `▁` for a space in SentencePiece vocabularies.

        Bytes of incomplete characters become names such as `<0xC3>`.
        """
        return self.decode([i])

    @abstractmethod
    def to_json(self) -> str:
        """Return the content of `tokenizer.json`."""


class ByteTokenizer(Tokenizer):
    """A tokenizer with one id per UTF-8 byte: the value of the byte."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8_bytes(text), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        values = np.asarray(ids, np.int64)
        check_not_negative(values)
        return bytes(values[values < 256].astype(np.uint8)).decode("utf-8", "replace")

    def name(self, i: int) -> str:
        return text_with_byte_names(bytes([i])) if i < 256 else ""

    def to_json(self) -> str:
        return str(byte_level_bpe(BYTE_VOCAB, []).to_str(pretty=True))


class WordTokenizer(Tokenizer):
    """A tokenizer with one id per word. Words are separated by white space."""

    separator = " "
    cuts = WHITESPACE

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(dict.fromkeys(words))
        self.vocab_size = len(self.words)
        self._ids = {w: i for i, w in enumerate(self.words)}

    def _usual_end(self) -> tuple[int, ...]:
        return tuple(self._ids[name] for name in EOS_NAMES if name in self._ids)[:1]

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        try:
            return np.array([self._ids[w] for w in words], np.int32)
        except KeyError:
            word = next(w for w in words if w not in self._ids)
            raise UserError(
                f"word {word!r} is not among the tokenizer's {self.vocab_size} words: remove it, or train on text that "
                f"contains it"
            ) from None

    def decode(self, ids: Ids) -> str:
        values = np.asarray(ids, np.int64)
        is_outside = (values < 0) | (values >= self.vocab_size)
        if is_outside.any():
            wrong = int(values[is_outside][0])
            raise UserError(f"id {wrong} is outside the vocabulary of {self.vocab_size}: use ids of this tokenizer")
        return self.separator.join(self.words[i] for i in values)

    def to_json(self) -> str:
        from tokenizers import pre_tokenizers

        library = self._word_level()
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return str(library.to_str(pretty=True))

    def _word_level(self) -> Any:
        """Return a tokenizer of the library with the ids of the words; the caller sets how it splits a text."""
        from tokenizers import Tokenizer as LibraryTokenizer
        from tokenizers import models

        return LibraryTokenizer(models.WordLevel(self._ids, unk_token="<unk>"))


class CharTokenizer(WordTokenizer):
    """A tokenizer with one id per character, sorted by code point."""

    separator = ""
    cuts = ANYWHERE

    def __init__(self, characters: Iterable[str]) -> None:
        super().__init__(sorted(set(characters)))
        points = np.array([ord(c) for c in self.words], np.int64)
        # The id of each code point; -1: no id. The last entry is for all higher code points.
        self._by_point = np.full(points.max(initial=0) + 2, -1, np.int32)
        self._by_point[points] = np.arange(len(points))

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids: np.ndarray = self._by_point[np.minimum(points, len(self._by_point) - 1)]
        if len(ids) and ids.min() < 0:
            index = int(ids.argmin())
            char = text[index]
            around = text[max(index - 12, 0) : index + 13]
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}, {unicodedata.name(char, 'unnamed')}) in {around!r} is not among "
                f"the tokenizer's {self.vocab_size} characters: remove it, or train on text that contains it"
            )
        return ids

    def to_json(self) -> str:
        from tokenizers import Regex, decoders, pre_tokenizers

        library = self._word_level()
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
        return str(library.to_str(pretty=True))


def check_not_negative(ids: np.ndarray) -> None:
    """Raise `UserError` if an id is negative."""
    if ids.min(initial=0) < 0:
        raise UserError(f"id {ids.min()} is negative: use ids of at least 0")


def utf8_bytes(text: str) -> bytes:
    """Return the UTF-8 bytes of a text; raise `UserError` for an unpaired surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as e:  # an unpaired surrogate, such as a non-UTF-8 byte of a command-line argument
        raise UserError(
            f"the text has {text[e.start]!r} at position {e.start}, which is not a valid character: remove it"
        ) from None
