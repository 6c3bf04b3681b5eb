"""Tokenizers: bytes, words, characters, and a wrapper of the `tokenizers` library."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxgpt.data.cuts import ANYWHERE, WHITESPACE, Cuts, cut, known_cuts
from jaxgpt.data.special import SpecialTokens
from jaxgpt.errors import UserError

T = TypeVar("T")
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<EOS>", "</s>")  # usual end-of-text tokens, in order of precedence

# Short texts of several kinds to encode before a continuation. It is unlikely that each of them forms a token together with the
# beginning of the continuation.
ANCHORS = ("\n", ".", "a", "0", "(", "\u6587")

Ids = Sequence[int] | np.ndarray


class Tokenizer(Protocol):
    """The interface of a tokenizer, with default implementations."""

    vocab_size: int  # V, the largest id plus 1
    special: SpecialTokens = SpecialTokens()  # special tokens from tokenizer or model files; empty: no such files
    separator: str = ""  # separator between two texts; non-empty: decoding does not restore white space
    cuts: Cuts = ANYWHERE  # pattern of places to cut a text without changing its ids; None: no known place
    byte_ids: Collection[int] = ()  # ids of tokens <0x00> to <0xFF>, if decoding joins these bytes to characters

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

    @property
    def unknown_id(self) -> int | None:
        """Id of text outside the vocabulary, which decoding does not restore, or None."""
        return None

    def _usual_end(self) -> tuple[int, ...]:
        """Return the id of the first usual end-of-text token in the vocabulary as a tuple, or ()."""
        return ()

    def encode(self, text: str) -> np.ndarray:
        """Encode a text to int32 ids. Names of special tokens, such as `<|endoftext|>`, are encoded as ordinary text.

        Raises:
            UserError: if the text has an unpaired surrogate, or characters or words outside the vocabulary.
        """
        ...

    def encode_special(self, text: str) -> np.ndarray:
        """Encode a text to int32 ids; the names of special tokens become the tokens' ids."""
        return self.encode(text)

    def decode(self, ids: Ids) -> str:
        """Decode ids to text.

        Raises:
            UserError: if an id is negative or, for words and characters, outside the vocabulary.
        """
        ...

    def settled(self, ids: list[int]) -> list[int]:
        """Return the ids without trailing byte tokens, because the next byte can change their text."""
        end = next((n for n in range(len(ids), 0, -1) if ids[n - 1] not in self.byte_ids), 0)
        return ids[:end]

    def has_text(self, vocab_size: int) -> np.ndarray:
        """Return a boolean mask `[vocab_size]` of the ids that have a text, unlike padding ids."""
        return np.arange(vocab_size) < self.vocab_size

    def name(self, i: int) -> str:
        """Return the text of a token; bytes of incomplete characters become names such as `<0xC3>`."""
        return self.decode([i])

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        ...


class ByteTokenizer(Tokenizer):
    """A tokenizer with one id per UTF-8 byte: the value of the byte."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        values = np.asarray(ids, np.int64)
        _check_negative(values)
        return bytes(values[values < 256].astype(np.uint8)).decode("utf-8", "replace")

    def name(self, i: int) -> str:
        return byte_names(bytes([i])) if i < 256 else ""

    def to_json(self) -> str:
        return byte_level(byte_vocab(), []).to_str(pretty=True)


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
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as LibraryTokenizer

        library = LibraryTokenizer(models.WordLevel(self._ids, unk_token="<unk>"))
        if self.separator:
            library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
        else:
            library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
            library.decoder = decoders.Fuse()  # type: ignore[assignment]
        return library.to_str(pretty=True)


class CharTokenizer(WordTokenizer):
    """A tokenizer with one id per character, sorted by code point."""

    separator = ""
    cuts = ANYWHERE

    def __init__(self, characters: Iterable[str]) -> None:
        super().__init__(sorted(set(characters)))
        points = np.array([ord(c) for c in self.words], np.int64)
        self._by_point = np.full(points.max(initial=0) + 2, -1, np.int32)  # last entry: higher code points
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


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: GPT-2's BPE, a trained BPE or an imported tokenizer."""

    def __init__(self, library: Any) -> None:
        library.encode_special_tokens = True  # names of special tokens in a text, encoded as ordinary text
        library.no_truncation()
        library.no_padding()
        if getattr(library.model, "dropout", None):
            library.model.dropout = None  # no BPE dropout, for deterministic encoding
        self.library = library
        self.cuts = known_cuts(library.to_str())
        # Llama 2 and others have byte tokens <0x00> to <0xFF>. If they decode to their names, decoding does not combine bytes.
        named = {library.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        self.byte_ids = frozenset(named if named and not self.decode([min(named)]).startswith("<0x") else ())
        self.vocab_size = max(library.get_vocab().values(), default=-1) + 1  # including unused ids

    @property
    def bos_ids(self) -> tuple[int, ...]:
        encoding = call_tokenizers(lambda: self.library.encode("a"), "this text")
        added = itertools.takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        return tuple(i for i, _ in added)

    def _usual_end(self) -> tuple[int, ...]:
        names = (self.special.names.get("eos_token", ""), *EOS_NAMES)
        return tuple(i for i in map(self.library.token_to_id, names) if i is not None)[:1]

    @cached_property
    def unknown_id(self) -> int | None:
        model = json.loads(self.library.to_str())["model"]
        if model["type"] == "Unigram":
            number: int | None = model["unk_id"]
            return number
        token = model.get("unk_token")
        return None if token is None else self.library.token_to_id(token)

    @cached_property
    def special_library(self) -> Any:
        """A copy that recognizes special tokens: switching modes of one tokenizer is not thread-safe.

        The copy has no post-processor: GPT-NeoX's, for example, trims white space from the offsets of ids.
        """
        copy = type(self.library).from_str(self.library.to_str())
        copy.post_processor = None
        return copy

    def has_text(self, vocab_size: int) -> np.ndarray:
        ids = np.array([*self.library.get_vocab().values()], np.int64)
        return np.isin(np.arange(vocab_size), ids)

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        pieces = cut(text, self.cuts)
        encoded = call_tokenizers(lambda: self.library.encode_batch_fast(pieces, add_special_tokens=False), "this text")
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encoded])

    def encode_special(self, text: str) -> np.ndarray:
        return np.array(self.encode_offsets(text).ids, np.int32)

    def encode_offsets(self, text: str) -> Any:
        """Encode like `encode_special`; return the library's encoding: ids and their character ranges."""
        _utf8(text)
        return call_tokenizers(lambda: self.special_library.encode(text, add_special_tokens=False), "this text")

    def decode(self, ids: Ids) -> str:
        values = np.asarray(ids, np.int64)
        _check_negative(values)
        return call_tokenizers(lambda: self.library.decode(values.tolist(), skip_special_tokens=False), "these ids")

    def name(self, i: int) -> str:
        token = self.library.id_to_token(i) or ""
        if i in self.byte_ids:
            return byte_names(bytes([int(token[1:-1], 16)]))
        byte_of = byte_vocab()
        if not byte_of.keys() >= set(token):
            return token
        return byte_names(bytes(byte_of[c] for c in token))  # byte-level BPE

    def to_json(self) -> str:
        return self.library.to_str(pretty=True)


def call_tokenizers(function: Callable[[], T], what: str) -> T:
    """Call `tokenizers` or tiktoken, and convert their exceptions, including Rust panics, to a UserError."""
    try:
        return function()
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot process {what} ({type(e).__name__}: {e})") from None


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Build the library's byte-level BPE, which splits text into words by GPT-2's pattern."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = LibraryTokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def byte_vocab() -> dict[str, int]:
    """Map GPT-2's printable character for each byte to the value of the byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b) if b in visible else chr(256 + hidden.index(b)): b for b in range(256)}


def _check_negative(ids: np.ndarray) -> None:
    if ids.min(initial=0) < 0:
        raise UserError(f"id {ids.min()} is negative: ids are at least 0")


def byte_names(data: bytes) -> str:
    """Return the text of UTF-8 bytes, with a name such as `<0xC3>` for each byte of an incomplete character."""
    text = data.decode("utf-8", "surrogateescape")
    # An incomplete byte is a surrogate from U+DC80 to U+DCFF, which no UTF-8 contains.
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


def _utf8(text: str) -> bytes:
    """Encode a text as UTF-8; raise `UserError` for an unpaired surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as e:  # an unpaired surrogate, such as a non-UTF-8 byte of a command-line argument
        raise UserError(
            f"the text has {text[e.start]!r} at position {e.start}, which is not a valid character: remove it"
        ) from None
