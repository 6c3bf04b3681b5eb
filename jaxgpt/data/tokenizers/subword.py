"""Tokenizers of the `tokenizers` library, and the conversion of its exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from jaxgpt.data.tokenizers.base import EOS_NAMES, Ids, Tokenizer, check_not_negative, utf8_bytes
from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB, text_with_byte_names
from jaxgpt.data.tokenizers.cuts import cut, known_cuts
from jaxgpt.errors import UserError

T = TypeVar("T")


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: GPT-2's BPE, a trained BPE or an imported tokenizer."""

    def __init__(self, library: Any) -> None:
        """Wrap a tokenizer of the library, and set its options: deterministic encoding without truncation."""
        library.encode_special_tokens = True  # encode names of special tokens in a text as ordinary text
        library.no_truncation()
        library.no_padding()
        if getattr(library.model, "dropout", None):  # only BPE has this option
            library.model.dropout = None

        self.library = library
        tokenizer_json = json.loads(library.to_str())
        self.cuts = known_cuts(tokenizer_json)
        self.vocab_size = max(library.get_vocab().values(), default=-1) + 1  # including unused ids
        self.unknown_id = _unknown_id(tokenizer_json["model"], library)
        self.byte_ids = _byte_ids(library)
        self._is_byte_level = _has_byte_level(tokenizer_json["decoder"])

    @property
    def bos_ids(self) -> tuple[int, ...]:
        encoding = call_tokenizers(lambda: self.library.encode("a"), "this text")
        ids = []
        for i, is_special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if not is_special:
                break
            ids.append(i)
        return tuple(ids)

    def _usual_end(self) -> tuple[int, ...]:
        for name in (self.special.names.get("eos_token", ""), *EOS_NAMES):
            i = self.library.token_to_id(name)
            if i is not None:
                return (i,)
        return ()

    @cached_property
    def special_library(self) -> Any:
        """A copy that recognizes special tokens: switching modes of one tokenizer is not thread-safe.

        The copy has no post-processor: GPT-NeoX's, for example, trims white space from the offsets of ids.
        """
        copy = read_library(self.library.to_str(), "this vocabulary")
        copy.post_processor = None
        return copy

    def has_text(self, vocab_size: int) -> np.ndarray:
        ids = np.array([*self.library.get_vocab().values()], np.int64)
        return np.isin(np.arange(vocab_size), ids)

    def encode(self, text: str) -> np.ndarray:
        utf8_bytes(text)  # raises an error for an unpaired surrogate
        pieces = cut(text, self.cuts)
        encoded = call_tokenizers(lambda: self.library.encode_batch_fast(pieces, add_special_tokens=False), "this text")
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encoded])

    def encode_special(self, text: str) -> np.ndarray:
        return np.array(self.encode_offsets(text).ids, np.int32)

    def encode_offsets(self, text: str) -> Any:
        """Encode like `encode_special`; return the library's encoding: ids and their character ranges."""
        utf8_bytes(text)  # raises an error for an unpaired surrogate
        return call_tokenizers(lambda: self.special_library.encode(text, add_special_tokens=False), "this text")

    def decode(self, ids: Ids) -> str:
        values = np.asarray(ids, np.int64)
        check_not_negative(values)
        return call_tokenizers(lambda: self.library.decode(values.tolist(), skip_special_tokens=False), "these ids")

    def name(self, i: int) -> str:
        token = self.library.id_to_token(i) or ""
        if i in self.byte_ids:
            return text_with_byte_names(bytes([_value_of_byte(token)]))
        # An added token may have other characters than the characters of bytes.
        if self._is_byte_level and BYTE_VOCAB.keys() >= set(token):
            return text_with_byte_names(bytes(BYTE_VOCAB[c] for c in token))
        return token

    def to_json(self) -> str:
        return str(self.library.to_str(pretty=True))


def read_library(tokenizer_json: str, what: str) -> Any:
    """Build a tokenizer of the library from the text of a tokenizer.json.

    Raises:
        UserError: if the library rejects the text; `what` names it in the error.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    return call_tokenizers(lambda: LibraryTokenizer.from_str(tokenizer_json), what)


def _byte_ids(library: Any) -> frozenset[int]:
    """Return the ids of the byte tokens <0x00> to <0xFF>, which Llama 2 and others have.

    If a byte token decodes to its name, decoding does not combine bytes, and the result is empty.
    """
    ids = {library.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
    if not ids:
        return frozenset()
    text = call_tokenizers(lambda: library.decode([min(ids)], skip_special_tokens=False), "these ids")
    if text.startswith("<0x"):
        return frozenset()
    return frozenset(ids)


def _value_of_byte(token: str) -> int:
    """Return the value of a byte token such as `<0xC3>`."""
    return int(token[1:-1], 16)


def _unknown_id(model: Mapping[str, Any], library: Any) -> int | None:
    """Return the id of text outside the vocabulary, from the `model` of tokenizer.json; None: no such id."""
    if model["type"] == "Unigram":
        number: int | None = model["unk_id"]
        return number
    token = model.get("unk_token")
    return None if token is None else library.token_to_id(token)


def _has_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """Return whether the `decoder` of tokenizer.json converts GPT-2's characters to bytes."""
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return any(_has_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def call_tokenizers(function: Callable[[], T], what: str) -> T:
    """Call `tokenizers` or tiktoken, and convert their exceptions, including Rust panics, to a UserError."""
    try:
        return function()
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot process {what} ({type(e).__name__}: {e})") from None
