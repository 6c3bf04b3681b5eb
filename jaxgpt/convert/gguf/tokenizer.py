"""Read the tokenizer of a GGUF file: a byte-level BPE, a SentencePiece BPE, or a tokenizer of characters or bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgpt.convert.gguf.library import Edges, build_byte_level, build_sentencepiece
from jaxgpt.convert.gguf.longest_match import read_longest_match
from jaxgpt.convert.gguf.pre_tokenizers import read_pre_tokenizer
from jaxgpt.convert.gguf.special import read_special_tokens
from jaxgpt.convert.gguf.vocabulary import GGML, OTHER, read_flag, read_vocabulary
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.errors import UserError, short_repr


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer of a GGUF file, with its special tokens and its chat template.

    Args:
        metadata: metadata of the file, keyed by name.
        where: path of the file, for errors.

    Raises:
        UserError: if the kind of tokenizer or pre-tokenizer is not supported, or the metadata of the tokenizer is malformed.
    """
    kind = metadata.get(f"{GGML}model")
    if kind not in ("gpt2", "llama", "rwkv"):
        raise UserError(f"{where}: {GGML}model {short_repr(kind)} is not supported: expected gpt2 or llama; {OTHER}")
    special = read_special_tokens(metadata, where)
    if kind == "gpt2":
        tokenizer = _read_byte_level(metadata, special, where)
    elif kind == "llama":
        tokenizer = _read_sentencepiece(metadata, special, where)
    else:
        tokenizer = read_longest_match(metadata, where)
    tokenizer.special = special
    return tokenizer


def _read_byte_level(metadata: Mapping[str, Any], special: SpecialTokens, where: str) -> Tokenizer:
    """Read a byte-level BPE; raise `UserError` if the library rejects it."""
    pre_tokenizer = read_pre_tokenizer(metadata, where)
    if f"{GGML}merges" not in metadata:
        raise UserError(f"{where}: no {GGML}merges, which a byte-level BPE needs; {OTHER}")
    vocabulary = read_vocabulary(metadata, where)
    edges = _read_edges(metadata, special, where, adds_bos=pre_tokenizer.adds_bos)
    library = call_tokenizers(lambda: build_byte_level(vocabulary, pre_tokenizer, edges), "this file")
    return SubwordTokenizer(library)


def _read_sentencepiece(metadata: Mapping[str, Any], special: SpecialTokens, where: str) -> Tokenizer:
    """Read a SentencePiece BPE; raise `UserError` if the library rejects it."""
    vocabulary = read_vocabulary(metadata, where)
    unknown = special.tokenizer.get("unk_token")
    has_prefix = read_flag(metadata, "add_space_prefix", True, where)
    edges = _read_edges(metadata, special, where, adds_bos=True)
    library = call_tokenizers(lambda: build_sentencepiece(vocabulary, unknown, has_prefix, edges), "this file")
    return SubwordTokenizer(library)


def _read_edges(metadata: Mapping[str, Any], special: SpecialTokens, where: str, adds_bos: bool) -> Edges:
    """Return the ids that begin and end each text; `adds_bos`: default of `add_bos_token`."""
    has_first = read_flag(metadata, "add_bos_token", adds_bos, where)
    has_last = read_flag(metadata, "add_eos_token", False, where)
    return Edges(
        first=special.bos_id if has_first else None,
        last=next(iter(special.end_ids), None) if has_last else None,
    )
