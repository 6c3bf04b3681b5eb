"""Text to ids and back: characters, words, and what the `tokenizers` library knows."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxgpt.config import UserError, did_you_mean

T = TypeVar("T")
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<EOS>", "</s>")
# Patterns that begin a word at every space which follows a word, so that a text may be cut there: Llama 3's and Qwen's.
CUTTABLE = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)
CHARACTERS = r"[\s\S]"  # the pattern of our own character tokenizers


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer.

    Attributes:
        vocab_size: V; ids are below it.
        eos_id: the id that ends a text, if there is one.
        glue: what stands between two texts that are put together.
    """

    glue: str

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    def encode(self, text: str) -> np.ndarray:
        """Ids as int32. Raises `UserError` for text that has no ids."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids."""
        ...

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        ...


class CharTokenizer:
    """One id for each character, in the order of their code points."""

    eos_id: int | None = None
    glue = ""

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self._points = np.array([ord(c) for c in self.characters], np.uint32)

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = np.searchsorted(self._points, points).clip(max=max(self.vocab_size - 1, 0))
        unknown = self._points[ids] != points if self.vocab_size else np.ones(len(points), bool)
        if unknown.any():
            place = int(unknown.argmax())
            char = text[place]
            name = unicodedata.name(char, "unnamed")
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}, {name}) at position {place} is not among "
                f"the tokenizer's {self.vocab_size} characters: leave it out, or train on text that has it"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(self.characters[i] for i in np.asarray(ids, np.int64))

    def to_json(self) -> str:
        from tokenizers import Regex, decoders, pre_tokenizers

        vocab = {c: i for i, c in enumerate(self.characters)}
        return _word_level(vocab, pre_tokenizers.Split(Regex(CHARACTERS), "isolated"), decoders.Fuse())


class WordTokenizer:
    """One id for each word; words are what stands between white space."""

    glue = " "

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(dict.fromkeys(words))
        self._ids = {w: i for i, w in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    @property
    def eos_id(self) -> int | None:
        return next((self._ids[name] for name in EOS_NAMES if name in self._ids), None)

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        for place, word in enumerate(words):
            if word not in self._ids:
                raise UserError(
                    f"word {word!r} at position {place} is not among the tokenizer's {self.vocab_size} words"
                    + did_you_mean(word, self.words)
                )
        return np.array([self._ids[w] for w in words], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(self.words[i] for i in np.asarray(ids, np.int64))

    def to_json(self) -> str:
        from tokenizers import pre_tokenizers

        return _word_level(self._ids, pre_tokenizers.WhitespaceSplit(), None)


class SubwordTokenizer:
    """Any tokenizer of the `tokenizers` library: bytes, GPT-2's BPE, one trained here, one of an imported model."""

    glue = ""

    def __init__(self, tokenizer: Any) -> None:
        # The names of special tokens within a user's text are text like any other.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._cuttable = _may_cut(tokenizer.to_str())
        self._eos = next((i for i in map(tokenizer.token_to_id, EOS_NAMES) if i is not None), None)
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # of merges, for training; a text has one row of ids
        # Not the number of words: ids may have holes.
        self._vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int | None:
        return self._eos

    def encode(self, text: str) -> np.ndarray:
        texts = cut(text) if self._cuttable else [text]
        pieces = asked(lambda: self._tokenizer.encode_batch(texts, add_special_tokens=False), "this text")
        return np.concatenate([np.array(p.ids, np.int32) for p in pieces] or [np.zeros(0, np.int32)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return asked(lambda: self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False), "these ids")

    def to_json(self) -> str:
        return self._tokenizer.to_str(pretty=True)


def asked(question: Callable[[], T], what: str) -> T:
    """What the library answers. It raises bare Exceptions, and where its Rust gives up, what is not even one of those.

    Raises:
        UserError: it did.
    """
    try:
        return question()
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot read {what} ({type(e).__name__}: {e})") from None


@contextmanager
def unheard() -> Iterator[None]:
    """What is written to the process's standard error in here, past Python, is dropped where an error is raised.

    A panic in Rust prints itself there before it becomes an exception, which says the same.
    """
    if sys.stderr is None:  # the process has none
        yield
        return
    with TemporaryFile() as heard:
        sys.stderr.flush()
        real = os.dup(2)
        try:
            os.dup2(heard.fileno(), 2)
            yield
        except BaseException:
            heard.truncate(0)
            raise
        finally:
            os.dup2(real, 2)
            heard.seek(0)
            os.write(real, heard.read())
            os.close(real)


def _word_level(vocab: dict[str, int], pre_tokenizer: Any, decoder: Any) -> str:
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import models

    tokenizer = HFTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer.to_str(pretty=True)


def cut(text: str, size: int = 1 << 16) -> list[str]:
    """Pieces that a byte-level BPE encodes apart as it would together: each but the first begins with a space after a
    character that is no white space, where the patterns of GPT-2, Llama 3 and Qwen always begin a word. (A line's end
    would not do: theirs may belong to the punctuation before it.)"""
    pieces, start = [], 0
    while len(text) - start > size:
        cut = text.find(" ", start + size)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.find(" ", cut + 1)
        if cut < 0:
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]] if start < len(text) else pieces


def _may_cut(tokenizer_json: str) -> bool:
    """Whether pieces may be encoded apart: bytes of words found by a pattern, and nothing put before a text."""
    data = json.loads(tokenizer_json)
    splitter = data.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    whole = not any(  # tokens that are looked for in the text itself, and reach over a cut
        not token["special"] and (token["rstrip"] or any(map(str.isspace, token["content"])))
        for token in data["added_tokens"]
    )
    splits = any(step.get("type") == "Split" or step.get("use_regex") for step in steps)
    return (
        whole and splits and all(map(_keeps_words, steps)) and (data["normalizer"] or {}).get("type") in (None, "NFC")
    )


def _keeps_words(step: dict[str, Any]) -> bool:
    """Whether a step of the splitting finds the same words in a piece of a text as in the whole."""
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    return any(step == split_by(pattern) for pattern in CUTTABLE)


def split_by(pattern: str) -> dict[str, Any]:
    """A splitting by a pattern, as tokenizer.json says it."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
