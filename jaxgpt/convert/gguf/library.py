"""Build tokenizers of the `tokenizers` library that compute the same ids as llama.cpp's BPE tokenizers."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxgpt.convert.gguf.pre_tokenizers import DIGIT, PreTokenizer
from jaxgpt.convert.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    token_ids,
)
from jaxgpt.data.tokenizers.byte_level import byte_level_bpe
from jaxgpt.data.tokenizers.word_patterns import GPT2


class Edges(NamedTuple):
    """Ids that begin and end each text; None: no token."""

    first: int | None
    last: int | None


def build_byte_level(vocabulary: Vocabulary, pre_tokenizer: PreTokenizer, edges: Edges) -> Any:
    """Build a byte-level BPE."""
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
    _add_tokens(library, vocabulary)
    _surround(library, edges)
    return library


def build_sentencepiece(vocabulary: Vocabulary, unknown: str | None, has_prefix: bool, edges: Edges) -> Any:
    """Build a BPE with merges in the order of scores, and with byte tokens for other characters.

    Args:
        vocabulary: tokens, types and scores.
        unknown: the unknown token.
        has_prefix: whether a space is added to the beginning of a text.
        edges: tokens that begin and end each text.
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
    _add_tokens(library, vocabulary)
    _surround(library, edges)
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
