"""Tokenizers: characters, words, bytes, and wrappers of the `tokenizers` library."""

from __future__ import annotations

import itertools
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from tempfile import TemporaryFile
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxgpt.config import UserError, did_you_mean
from jaxgpt.data.pieces import WORD_CUTS, Find, cut, find_any, find_by, find_tried, known_cuts
from jaxgpt.data.special import SpecialTokens

T = TypeVar("T")
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<EOS>", "</s>")
CHARACTERS = r"[\s\S]"  # pattern of our character tokenizers


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: V; all ids are smaller.
        special: special tokens named by the files of an imported model; empty for other tokenizers.
        bos_ids: ids to put before a text.
        end_ids: ids that end a text.
        eos_id: the first of end_ids, or None.
        separator: separator to join two texts with.
        find: finds places to cut a text without changing its ids (`pieces.cut`).
        byte_ids: ids of single bytes. A run of them is decoded to characters as a whole.
    """

    separator: str
    special: SpecialTokens

    @property
    def find(self) -> Find: ...
    @property
    def byte_ids(self) -> Collection[int]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_ids(self) -> tuple[int, ...]: ...
    @property
    def end_ids(self) -> tuple[int, ...]: ...
    @property
    def eos_id(self) -> int | None: ...
    def encode(self, text: str) -> np.ndarray:
        """Encode a text to int32 ids. Raises `UserError` if it has characters or words outside the vocabulary.

        The names of special tokens are ordinary text.
        """
        ...

    def encode_special(self, text: str) -> np.ndarray:
        """Encode a text in which the names of special tokens stand for their ids."""
        ...

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Encode as `encode_special` does, and return which ids have characters in the ranges `[begin, end)`, as bool."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> np.ndarray:
        """Encode pieces of a text to int32 ids, concatenated."""
        ...

    def offset(self, text: str, index: int) -> int:
        """Return the UTF-8 byte at which id number `index` of a text begins, or the text's length if there is no such id."""
        ...

    def has_text(self, vocab_size: int) -> np.ndarray:
        """Return which ids below `vocab_size` have a text, bool `[V]`; the vocabulary of a model may be padded."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids to text."""
        ...

    def name(self, i: int) -> str:
        """Return a name for a token that is not whole characters: its bytes, such as `<0xC3>`, where it has bytes."""
        ...

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        ...


class _Special:
    """Base of all tokenizers: special tokens."""

    special = SpecialTokens()

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        raise NotImplementedError

    def name(self, i: int) -> str:
        return self.decode([i])

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        named = tuple(i for i in self.special.end_ids if i < self.vocab_size)
        return named or self._usual_end()

    @property
    def eos_id(self) -> int | None:
        return next(iter(self.end_ids), None)

    def _usual_end(self) -> tuple[int, ...]:
        """Return the end token, found by its usual names."""
        return ()


class _Table(_Special):
    """Base of tokenizers with ids 0, 1, 2, ... that encode pieces no faster than the whole text."""

    def has_text(self, vocab_size: int) -> np.ndarray:
        return np.arange(vocab_size) < self.vocab_size

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def encode_special(self, text: str) -> np.ndarray:
        return self.encode(text)

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        cuts = [0, *itertools.chain.from_iterable(spans), len(text)]
        parts = [self.encode(text[begin:end]) for begin, end in itertools.pairwise(cuts)]
        return np.concatenate(parts), np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])

    def encode_pieces(self, pieces: Sequence[str]) -> np.ndarray:
        return self.encode("".join(pieces))


class ByteTokenizer(_Table):
    """A tokenizer with one id per UTF-8 byte, its value."""

    separator = ""
    find = staticmethod(find_any)
    byte_ids: Collection[int] = ()

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def offset(self, text: str, index: int) -> int:
        return index

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        values = np.asarray(ids, np.int64)
        return bytes(values[(values >= 0) & (values < 256)].astype(np.uint8)).decode("utf-8", "replace")

    def name(self, i: int) -> str:
        return f"<0x{i:02X}>"

    def to_json(self) -> str:
        return byte_level(byte_vocab(), []).to_str(pretty=True)


class CharTokenizer(_Table):
    """A tokenizer with one id per character, sorted by code point."""

    separator = ""
    find = staticmethod(find_any)
    byte_ids: Collection[int] = ()

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        points = [ord(c) for c in self.characters]
        self._ids = np.full(
            max(points, default=0) + 2, -1, np.int32
        )  # by code point; the last entry is for all higher ones
        self._ids[np.array(points, np.int64)] = np.arange(len(points))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids: np.ndarray = self._ids[np.minimum(points, len(self._ids) - 1)]
        if len(ids) and ids.min() < 0:
            place = int(ids.argmin())
            char, around = text[place], text[max(place - 12, 0) : place + 13]
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}, {unicodedata.name(char, 'unnamed')}) in {around!r} is not among "
                f"the tokenizer's {self.vocab_size} characters: remove it, or train on text that contains it"
            )
        return ids

    def offset(self, text: str, index: int) -> int:
        return len(text[:index].encode())

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(self.characters[i] for i in np.asarray(ids, np.int64))

    def to_json(self) -> str:
        from tokenizers import Regex, decoders, pre_tokenizers

        vocab = {c: i for i, c in enumerate(self.characters)}
        return _word_level(vocab, pre_tokenizers.Split(Regex(CHARACTERS), "isolated"), decoders.Fuse())


class WordTokenizer(_Table):
    """A tokenizer with one id per word. Words are separated by white space."""

    separator = " "
    find = staticmethod(find_by(WORD_CUTS))
    byte_ids: Collection[int] = ()

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(dict.fromkeys(words))
        self._ids = {w: i for i, w in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def _usual_end(self) -> tuple[int, ...]:
        return tuple(self._ids[name] for name in EOS_NAMES if name in self._ids)[:1]

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        try:
            return np.array([self._ids[w] for w in words], np.int32)
        except KeyError:
            word = next(w for w in words if w not in self._ids)
            near = did_you_mean(word, self.words)
            raise UserError(f"word {word!r} is not among the tokenizer's {self.vocab_size} words{near}") from None

    def offset(self, text: str, index: int) -> int:
        rest = text.split(None, index)[index:]
        return len(text.encode()) - len(rest[0].encode() if rest else b"")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(self.words[i] for i in np.asarray(ids, np.int64))

    def to_json(self) -> str:
        from tokenizers import pre_tokenizers

        return _word_level(self._ids, pre_tokenizers.WhitespaceSplit(), None)


class SubwordTokenizer(_Special):
    """A tokenizer of the `tokenizers` library: GPT-2's BPE, a BPE trained here, or that of an imported model."""

    separator = ""

    def __init__(self, tokenizer: Any) -> None:
        # Encode the names of special tokens in a user's text as ordinary text.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._cuts = known_cuts(tokenizer.to_str())
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # BPE dropout is for training; encoding must be deterministic
        # In tokenizers like Llama 2's, a byte is a token <0xF0>. The decoder joins bytes; without one, the name is shown.
        named = {tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        joined = named and not self.decode([min(named)]).startswith("<0x")
        self.byte_ids: Collection[int] = frozenset(named) if joined else ()
        # Not the number of tokens: ids may have gaps.
        self._vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def within(self, vocab_size: int) -> SubwordTokenizer:
        """Return the tokenizer without the added tokens beyond a model's vocabulary, such as Gemma 3's `<image_soft_token>`."""
        if self.vocab_size <= vocab_size:
            return self
        value = json.loads(self.to_json())
        beyond = {token["content"] for token in value["added_tokens"] if token["id"] >= vocab_size}
        value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] not in beyond]
        if isinstance(vocab := value["model"].get("vocab"), dict):
            value["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in beyond}
        kind = type(self._tokenizer)
        smaller = SubwordTokenizer(call_tokenizers(lambda: kind.from_str(json.dumps(value)), "this vocabulary"))
        smaller.special = self.special
        return smaller

    @property
    def find(self) -> Find:
        """A new function each time: what it has tried in one text does not change the cuts of the next."""
        return find_by(self._cuts) if self._cuts else find_tried(self.encode_batch)

    @property
    def bos_ids(self) -> tuple[int, ...]:
        encoding = call_tokenizers(lambda: self._tokenizer.encode("a"), "this text")
        added = itertools.takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        return tuple(i for i, _ in added)

    def _usual_end(self) -> tuple[int, ...]:
        names = (self.special.tokenizer.get("eos_token", ""), *EOS_NAMES)
        return tuple(i for i in map(self._tokenizer.token_to_id, names) if i is not None)[:1]

    @cached_property
    def _with_names(self) -> Any:
        """A copy that recognizes the names of special tokens. Switching one tokenizer back and forth is not thread-safe.

        It has no post-processor: that of GPT-NeoX, for example, leaves white space out of the offsets of ids.
        """
        copy = type(self._tokenizer).from_str(self._tokenizer.to_str())
        copy.post_processor = None
        return copy

    def has_text(self, vocab_size: int) -> np.ndarray:
        ids = np.array([*self._tokenizer.get_vocab().values()], np.int64)
        return np.isin(np.arange(vocab_size), ids)

    def encode(self, text: str) -> np.ndarray:
        try:
            return self.encode_pieces(cut(text, self.find))
        except UserError:
            _utf8(text)
            raise

    def encode_special(self, text: str) -> np.ndarray:
        return self.encode_spans(text, [])[0]

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        encode = partial(self._with_names.encode, text, add_special_tokens=False)
        try:
            encoding = call_tokenizers(encode, "this text")
        except UserError:
            _utf8(text)
            raise
        inside, offsets = np.zeros(len(encoding.ids), bool), encoding.offsets
        for begin, end in spans:
            # A character that the tokenizer drops has no id.
            first, last = (
                next((i for i in map(encoding.char_to_token, places) if i is not None), None)
                for places in (range(begin, end), range(end - 1, begin - 1, -1))
            )
            if first is not None and last is not None:
                while last + 1 < len(inside) and offsets[last + 1][0] < offsets[last][1]:
                    last += 1  # the character has several tokens
                inside[first : last + 1] = True
        return np.array(encoding.ids, np.int32), inside

    def encode_pieces(self, pieces: Sequence[str]) -> np.ndarray:
        return np.concatenate([np.array(ids, np.int32) for ids in self.encode_batch(pieces)] or [np.zeros(0, np.int32)])

    def offset(self, text: str, index: int) -> int:
        pieces, begin = cut(text, self.find), 0
        for piece, ids in zip(pieces, self.encode_batch(pieces), strict=True):
            if index < len(ids):
                encode = partial(self._tokenizer.encode, piece, add_special_tokens=False)
                return begin + len(piece[: call_tokenizers(encode, "this text").offsets[index][0]].encode())
            begin, index = begin + len(piece.encode()), index - len(ids)
        return begin

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return call_tokenizers(
            lambda: self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False), "these ids"
        )

    def name(self, i: int) -> str:
        token, byte_of = self._tokenizer.id_to_token(i) or "", byte_vocab()
        if i in self.byte_ids or not byte_of.keys() >= set(token):
            return token
        return "".join(f"<0x{byte_of[c]:02X}>" for c in token)  # byte-level BPE

    def to_json(self) -> str:
        return self._tokenizer.to_str(pretty=True)

    def encode_batch(self, pieces: Sequence[str]) -> list[list[int]]:
        """Encode each piece. The library encodes pieces in parallel, on all cores."""
        encodings = call_tokenizers(
            lambda: self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False), "this text"
        )
        return [encoding.ids for encoding in encodings]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:  # a byte of an argument that is not UTF-8
        raise UserError(
            f"the text has {text[e.start]!r} at position {e.start}, which is not a valid character"
        ) from None


def call_tokenizers(question: Callable[[], T], what: str) -> T:
    """Call `tokenizers`, and turn its exceptions, Rust panics included, into a UserError.

    Raises:
        UserError: the library raised an exception.
    """
    try:
        return question()
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot process {what} ({type(e).__name__}: {e})") from None


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Suppress output of native code to standard error if the block raises.

    A Rust panic is printed there before it becomes an exception with the same message.
    """
    if sys.stderr is None:  # closed
        yield
        return
    with TemporaryFile() as captured:
        sys.stderr.flush()
        real = os.dup(2)
        try:
            os.dup2(captured.fileno(), 2)
            yield
        except BaseException:
            captured.truncate(0)
            raise
        finally:
            os.dup2(real, 2)
            captured.seek(0)
            os.write(real, captured.read())
            os.close(real)


def _word_level(vocab: dict[str, int], pre_tokenizer: Any, decoder: Any) -> str:
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import models

    tokenizer = HFTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer.to_str(pretty=True)


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Build the library's byte-level BPE, which splits words by GPT-2's pattern."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = HFTokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def byte_vocab() -> dict[str, int]:
    """Map GPT-2's printable character for each byte to the value of the byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b) if b in visible else chr(256 + hidden.index(b)): b for b in range(256)}
