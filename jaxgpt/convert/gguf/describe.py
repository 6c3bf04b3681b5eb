"""Describe a tokenizer in the metadata of a GGUF file.

A byte-level BPE is identified by the name of its pre-tokenizer, and a SentencePiece BPE has scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.convert.gguf.compare import compare, prepend_scheme
from jaxgpt.convert.gguf.longest_match import describe_longest_match
from jaxgpt.convert.gguf.pre_tokenizers import pre_tokenizer_name
from jaxgpt.convert.gguf.special import describe_special_tokens
from jaxgpt.convert.gguf.tokenizer import read_tokenizer
from jaxgpt.convert.gguf.vocabulary import (
    BYTE,
    CONTROL,
    GGML,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    describe_vocabulary,
)
from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

UNSCORED = -1e6  # score of a token that no merge forms
# Variables of chat templates that llama.cpp sets to true if a template reads them, even if its caller passes no value.
ALWAYS = ("enable_thinking",)
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class Description(NamedTuple):
    """A tokenizer in the metadata of a GGUF file."""

    metadata: dict[str, Any]
    note: str  # texts with special tokens or leading spaces that have different ids in llama.cpp; empty: none


class Algorithm(NamedTuple):
    """The tokens of a file, and how llama.cpp finds them in a text."""

    vocabulary: Vocabulary
    options: dict[str, Any]  # further metadata of the tokenizer, without the prefix `GGML`


def describe_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> Description:
    """Describe a tokenizer in metadata, for a model with `vocab_size` ids.

    Raises:
        UserError: if llama.cpp has no tokenizer that computes the same ids.
    """
    if isinstance(tokenizer, (ByteTokenizer, CharTokenizer)):
        algorithm = Algorithm(describe_longest_match(tokenizer), {"model": "rwkv"})
    elif isinstance(tokenizer, SubwordTokenizer):
        algorithm = _subwords(tokenizer)
    else:
        raise UserError("GGUF files have no tokenizer of words or ids: train with data.tokenizer bpe, char or byte")

    vocabulary = _padded(algorithm.vocabulary, vocab_size)
    metadata = {f"{GGML}{name}": value for name, value in algorithm.options.items()}
    metadata |= describe_vocabulary(vocabulary)
    metadata |= describe_special_tokens(tokenizer, vocabulary.tokens)
    reread = read_tokenizer(metadata, "the exported file")
    return Description(metadata, compare(reread, tokenizer))


def _padded(vocabulary: Vocabulary, vocab_size: int) -> Vocabulary:
    """Extend a vocabulary to all ids of the model; ids without a token, such as padding, are unused tokens."""
    missing = range(len(vocabulary.tokens), vocab_size)
    padded = vocabulary._replace(
        tokens=vocabulary.tokens + [f"[PAD{i}]" for i in missing],
        types=vocabulary.types + [UNUSED for _ in missing],
    )
    if vocabulary.scores:
        padded = padded._replace(scores=vocabulary.scores + [UNSCORED for _ in missing])
    return padded


def _subwords(tokenizer: SubwordTokenizer) -> Algorithm:
    """Describe a BPE of the `tokenizers` library."""
    content = json.loads(tokenizer.to_json())
    model = content["model"]
    if model["type"] != "BPE":
        raise UserError(f"GGUF files have no tokenizer of type {model['type']}, only BPE: export a directory")
    vocabulary = _read_vocabulary(content, tokenizer.vocab_size)
    if not vocabulary.merges:
        raise UserError("GGUF files have no BPE without merges: train with data.tokenizer byte")
    if model["byte_fallback"]:
        return _sentencepiece(content, vocabulary)

    name = pre_tokenizer_name(content)
    if not name:
        raise UserError(
            "jaxgpt knows no llama.cpp pre-tokenizer that splits words as in this tokenizer.json: export a directory"
        )
    return Algorithm(vocabulary, {"model": "gpt2", "pre": name})


def _read_vocabulary(content: Mapping[str, Any], vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json; added tokens become control or user-defined tokens, matched before merges."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED for _ in tokens]
    for token, i in content["model"]["vocab"].items():
        tokens[i] = token
        types[i] = NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED

    merges = []
    for merge in content["model"]["merges"]:  # a pair of tokens; in older files, a string
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        merges.append((left, right))
    return Vocabulary(tokens, types, [], merges)


def _sentencepiece(content: Mapping[str, Any], vocabulary: Vocabulary) -> Algorithm:
    """Describe a BPE with byte tokens: scores instead of merges, the types of all tokens, and the space before a text.

    The score of a token is minus the rank of its first merge.
    """
    unknown = content["model"]["unk_token"]
    types = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token == unknown and kind == CONTROL:
            types.append(UNKNOWN)  # found in a text, like a control token
        elif token in BYTE_NAMES and kind == NORMAL:
            types.append(BYTE)
        else:
            types.append(kind)

    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(vocabulary.merges):
        rank.setdefault(left + right, number)
    scores = [-float(rank[token]) if token in rank else UNSCORED for token in vocabulary.tokens]

    options = {"model": "llama", "pre": "default", "add_space_prefix": _begins_with_space(content)}
    if unknown in vocabulary.tokens:
        options["unknown_token_id"] = vocabulary.tokens.index(unknown)
    return Algorithm(Vocabulary(vocabulary.tokens, types, scores, []), options)


def _begins_with_space(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json adds a space to the beginning of a text."""
    if prepend_scheme(content) != "never":
        return True
    normalizer = content["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Prepend" and step["prepend"] == SPACE for step in steps)
