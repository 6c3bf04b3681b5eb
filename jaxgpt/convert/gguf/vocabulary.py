"""The vocabulary in the metadata of a GGUF file: tokens, their types and scores, and merges."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.errors import UserError, short_repr

GGML = "tokenizer.ggml."
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # the space of SentencePiece
PADDING = re.compile(r"\[PAD\d+\]")  # unused tokens that a converter adds to fill the vocabulary
OTHER = "pass the model's tokenizer.json with --tokenizer"

# llama.cpp token types.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6


class Vocabulary(NamedTuple):
    """The tokens of a file."""

    tokens: list[str]  # text of each id
    types: list[int]  # type of each id
    scores: list[float]  # score of each id; empty: the file has no scores
    merges: list[tuple[str, str]]  # pairs of tokens, in order


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Read and check the tokens, their types and scores, and the merges."""
    tokens = read_array(metadata, "tokens", str, where)
    types = read_array(metadata, "token_type", int, where) or [NORMAL] * len(tokens)
    scores = read_array(metadata, "scores", float, where)
    merges = read_array(metadata, "merges", str, where)

    if not tokens:
        raise UserError(f"{where}: no tokens in {GGML}tokens; {OTHER}")
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise UserError(f"{where}: {GGML}{name} has {len(values)} values for {len(tokens)} tokens; {OTHER}")
    if not all(map(math.isfinite, scores)):
        raise UserError(f"{where}: {GGML}scores must be finite numbers; {OTHER}")
    counts = Counter(token for token in tokens if token)
    twice = [token for token, count in counts.items() if count > 1]
    if twice:
        raise UserError(f"{where}: duplicate token {short_repr(twice[0])} in {GGML}tokens; {OTHER}")
    pairs = [_pair(merge, where) for merge in merges]
    return Vocabulary(tokens, types, scores, pairs)


def describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the metadata of a vocabulary, without empty scores and merges: the inverse of `read_vocabulary`."""
    values: dict[str, Any] = {"tokens": vocabulary.tokens, "token_type": vocabulary.types}
    if vocabulary.scores:
        values["scores"] = vocabulary.scores
    if vocabulary.merges:
        values["merges"] = [" ".join(pair) for pair in vocabulary.merges]
    return {f"{GGML}{name}": value for name, value in values.items()}


def _pair(merge: str, where: str) -> tuple[str, str]:
    """Split a merge into its two tokens."""
    middle = merge.find(" ", 1)  # a token may begin with a space
    if middle < 0 or middle == len(merge) - 1:
        problem = f"{short_repr(merge)} in {GGML}merges is not two tokens separated by a space"
        raise UserError(f"{where}: {problem}; {OTHER}")
    return merge[:middle], merge[middle + 1 :]


def token_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids of the tokens with a text, without padding."""
    ids = {}
    for i, token in enumerate(vocabulary.tokens):
        is_padding = vocabulary.types[i] == UNUSED and PADDING.fullmatch(token)
        if token and not is_padding:
            ids[token] = i
    return ids


def read_flag(metadata: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """Read a boolean of a tokenizer; raise `UserError` for other types."""
    value = metadata.get(f"{GGML}{name}", default)
    if type(value) is not bool:
        raise UserError(f"{where}: {GGML}{name} must be true or false: {short_repr(value)}; {OTHER}")
    return value


def read_array(metadata: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    """Read a list of a tokenizer, [] if it is absent; raise `UserError` if an element is not of type `kind`."""
    value = metadata.get(f"{GGML}{name}", [])
    if not isinstance(value, list) or not all(type(each) is kind for each in value):
        problem = f"{GGML}{name} must be an array of type {kind.__name__}: {short_repr(value)}"
        raise UserError(f"{where}: {problem}; {OTHER}")
    return value
