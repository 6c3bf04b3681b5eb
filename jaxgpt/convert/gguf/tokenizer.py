"""Tokenizers of GGUF files: byte-level BPE with llama.cpp's pre-tokenizers, and SentencePiece BPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxgpt.convert.gguf.longest_match import read_longest_match
from jaxgpt.convert.gguf.pre_tokenizers import DIGIT, PreTokenizer, read_pre_tokenizer
from jaxgpt.convert.gguf.special import read_special_tokens
from jaxgpt.convert.gguf.vocabulary import (
    BYTE,
    CONTROL,
    GGML,
    NORMAL,
    OTHER,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_flag,
    read_vocabulary,
    token_ids,
)
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.byte_level import byte_level_bpe
from jaxgpt.data.tokenizers.cuts import GPT2
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.errors import UserError, short_repr


class Edges(NamedTuple):
    """Ids that begin and end each text; None: no token."""

    first: int | None
    last: int | None


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer of a GGUF file, with its special tokens and its chat template.

    Args:
        metadata: metadata of the file, keyed by name.
        where: path of the file, for errors.

    Raises:
        UserError: if the kind of tokenizer or pre-tokenizer is not supported, or the tokens are malformed.
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
    """Build a byte-level BPE."""
    pre_tokenizer = read_pre_tokenizer(metadata, where)
    if f"{GGML}merges" not in metadata:
        raise UserError(f"{where}: no {GGML}merges, which a byte-level BPE needs; {OTHER}")
    vocabulary = read_vocabulary(metadata, where)
    edges = _read_edges(metadata, special, pre_tokenizer.adds_bos, where)
    return _build(lambda: _byte_level(vocabulary, pre_tokenizer), vocabulary, edges)


def _read_sentencepiece(metadata: Mapping[str, Any], special: SpecialTokens, where: str) -> Tokenizer:
    """Build a SentencePiece BPE."""
    vocabulary = read_vocabulary(metadata, where)
    unknown = special.tokenizer.get("unk_token")
    has_prefix = read_flag(metadata, "add_space_prefix", True, where)
    edges = _read_edges(metadata, special, True, where)
    return _build(lambda: _sentencepiece(vocabulary, unknown, has_prefix), vocabulary, edges)


def _read_edges(metadata: Mapping[str, Any], special: SpecialTokens, adds_bos: bool, where: str) -> Edges:
    """Return the ids that begin and end each text; `adds_bos`: default of `add_bos_token`."""
    has_first = read_flag(metadata, "add_bos_token", adds_bos, where)
    has_last = read_flag(metadata, "add_eos_token", False, where)
    return Edges(
        first=special.bos_id if has_first else None,
        last=next(iter(special.end_ids), None) if has_last else None,
    )


def _build(make: Callable[[], Any], vocabulary: Vocabulary, edges: Edges) -> Tokenizer:
    """Complete the library's tokenizer that `make` returns; raise `UserError` if the library rejects the file."""

    def complete() -> Any:
        library = make()
        _add_tokens(library, vocabulary)
        _surround(library, edges)
        return library

    return SubwordTokenizer(call_tokenizers(complete, "this file"))


def _byte_level(vocabulary: Vocabulary, pre_tokenizer: PreTokenizer) -> Any:
    """Build the library's byte-level BPE."""
    from tokenizers import Regex, pre_tokenizers

    library = byte_level_bpe(token_ids(vocabulary), vocabulary.merges)
    library.model.ignore_merges = pre_tokenizer.ignores_merges
    steps: list[Any] = []
    for pattern in pre_tokenizer.patterns:
        if pattern == DIGIT:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif pattern != GPT2:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    # ByteLevel contains the pattern of GPT-2.
    has_gpt2 = pre_tokenizer.patterns[-1] == GPT2
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_gpt2))
    library.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    return library


def _sentencepiece(vocabulary: Vocabulary, unknown: str | None, has_prefix: bool) -> Any:
    """Build the library's BPE with merges in the order of scores, and with byte tokens for other characters.

    Args:
        vocabulary: tokens, types and scores.
        unknown: the unknown token.
        has_prefix: whether a space is added to the beginning of a text.
    """
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, normalizers

    model = models.BPE(
        token_ids(vocabulary),
        _merges(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    library: Any = LibraryTokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        library.normalizer = spaces
    library.decoder = decoders.Sequence(decoding)
    return library


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, by descending score of the token, then by its id."""
    tokens, types, scores, _ = vocabulary
    scores = scores or [0.0] * len(tokens)
    ids = token_ids(vocabulary)
    # Merges never form control, unknown or byte tokens. User-defined tokens are found before the merges.
    merged = [i for i in range(len(tokens)) if types[i] in (NORMAL, UNUSED)]
    merged.sort(key=lambda i: (-scores[i], i))
    pairs = []
    for i in merged:
        token = tokens[i]
        cuts = range(1, len(token))
        pairs += [(token[:cut], token[cut:]) for cut in cuts if token[:cut] in ids and token[cut:] in ids]
    return pairs


def _add_tokens(library: Any, vocabulary: Vocabulary) -> None:
    """Add the tokens that are found in a text before it is split into words."""
    from tokenizers import AddedToken

    for kind, add in (
        (CONTROL, library.add_special_tokens),
        (UNKNOWN, library.add_special_tokens),
        (USER_DEFINED, library.add_tokens),
    ):
        texts = [text for text, each in zip(vocabulary.tokens, vocabulary.types, strict=True) if each == kind and text]
        add([AddedToken(text, normalized=False) for text in texts])


def _surround(library: Any, edges: Edges) -> None:
    """Begin and end each text with the tokens of `edges`."""
    from tokenizers import processors

    before = []
    after = []
    if edges.first is not None:
        before.append(library.id_to_token(edges.first))
    if edges.last is not None:
        after.append(library.id_to_token(edges.last))
    ids = [(token, library.token_to_id(token)) for token in dict.fromkeys(before + after)]
    if ids:
        library.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=ids)
