"""Tokenizers of GGUF files: byte-level BPE with llama.cpp's pre-tokenizers, and SentencePiece BPE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.convert.gguf_special import read_special_tokens
from jaxgpt.convert.gguf_vocabulary import (
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
from jaxgpt.data.byte_level import byte_level_bpe
from jaxgpt.data.cuts import GPT2, LLAMA3
from jaxgpt.data.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.errors import UserError, short_repr

# Patterns of pre-tokenizers, as in the tokenizer.json files of the models.
DIGIT = r"\p{N}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGIT)


class Words(NamedTuple):
    """A llama.cpp pre-tokenizer.

    Attributes:
        patterns: patterns that split a text into words, one after another.
        whole: whether a word in the vocabulary is one token, regardless of the merges.
        bos: default of `add_bos_token`.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


GPT2_WORDS = Words((GPT2,))
DIGIT_WORDS = Words((DIGIT, GPT2))
LLAMA3_WORDS = Words((LLAMA3[0],), whole=True, bos=True)
QWEN_WORDS = Words((LLAMA3[1],))

# Map from values of tokenizer.ggml.pre, in files of the supported families, to pre-tokenizers.
PRE_TOKENIZERS: dict[str, Words] = {
    **dict.fromkeys(
        "gpt-2 olmo mpt phi-2 trillion granite-docling gigachat exaone4 mellum a.x-4.0".split(), GPT2_WORDS
    ),
    **dict.fromkeys("smollm starcoder refact codeshell minerva-7b mellum2".split(), DIGIT_WORDS),
    **dict.fromkeys("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2".split(), LLAMA3_WORDS),
    **dict.fromkeys("dbrx smaug-bpe".split(), LLAMA3_WORDS._replace(whole=False, bos=False)),
    **dict.fromkeys("qwen2 deepseek-r1-qwen megrez kormo stablelm2 solar-open".split(), QWEN_WORDS),
    "tekken": Words((TEKKEN,), whole=True, bos=True),  # llama.cpp's own pattern differs at combining marks
    "deepseek-coder": Words(DEEPSEEK_CODER),
}
NAMELESS = ("gpt2", "gptneox")  # architectures whose files without tokenizer.ggml.pre have the pre-tokenizer of GPT-2


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer of a GGUF file, with its special tokens and its chat template.

    Args:
        metadata: metadata of the file, keyed by name.
        where: path of the file, for errors.

    Raises:
        UserError: if the kind of tokenizer or pre-tokenizer is not supported, or the tokens are malformed.
    """
    kind = metadata.get(f"{GGML}model")
    if kind == "rwkv":
        return _longest_match(metadata, where)
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{where}: {GGML}model {short_repr(kind)} is not supported: expected gpt2 or llama; {OTHER}")
    words = _words(metadata, where) if kind == "gpt2" else Words((), bos=True)
    if kind == "gpt2" and f"{GGML}merges" not in metadata:
        raise UserError(f"{where}: no {GGML}merges, so words cannot be merged to tokens; {OTHER}")
    vocabulary = read_vocabulary(metadata, where)
    special = read_special_tokens(metadata, where)

    prefix = read_flag(metadata, "add_space_prefix", True, where)
    add_bos = read_flag(metadata, "add_bos_token", words.bos, where)
    add_eos = read_flag(metadata, "add_eos_token", False, where)

    def build() -> Any:
        if kind == "gpt2":
            library = _byte_level(vocabulary, words)
        else:
            library = _sentencepiece(vocabulary, special.tokenizer.get("unk_token"), prefix)
        _add_tokens(library, vocabulary)
        first = special.bos_id if add_bos else None
        last = next(iter(special.end_ids), None) if add_eos else None
        _surround(library, first, last)
        return library

    tokenizer = SubwordTokenizer(call_tokenizers(build, "this file"))
    tokenizer.special = special
    return tokenizer


def _words(metadata: Mapping[str, Any], where: str) -> Words:
    """Return the pre-tokenizer of a byte-level BPE."""
    name = metadata.get(f"{GGML}pre", "default")
    if name == "default" and metadata.get("general.architecture") in NAMELESS:
        name = "gpt-2"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{where}: {GGML}pre {short_repr(name)} is not supported: expected one of {known}; {OTHER}")
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: Vocabulary, words: Words) -> Any:
    """Build a byte-level BPE that splits a text into words."""
    from tokenizers import Regex, pre_tokenizers

    library = byte_level_bpe(token_ids(vocabulary), vocabulary.merges)
    library.model.ignore_merges = words.whole
    steps: list[Any] = []
    for pattern in words.patterns:
        if pattern == DIGIT:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif pattern != GPT2:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    # ByteLevel contains the pattern of GPT-2.
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.patterns[-1] == GPT2))
    library.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    return library


def _sentencepiece(vocabulary: Vocabulary, unknown: str | None, prefix: bool) -> Any:
    """Build a BPE with merges in the order of scores, and with byte tokens for other characters.

    Args:
        vocabulary: tokens, types and scores.
        unknown: the unknown token.
        prefix: whether a text begins with a space.
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
    if prefix:
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
    # Text never becomes a control, unknown or byte token. User-defined tokens are found before the merges.
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


def _surround(library: Any, first: int | None, last: int | None) -> None:
    """Begin and end each text with a token; None: no token."""
    from tokenizers import processors

    before = [library.id_to_token(i) for i in (first,) if i is not None]
    after = [library.id_to_token(i) for i in (last,) if i is not None]
    ids = [(token, library.token_to_id(token)) for token in dict.fromkeys(before + after)]
    if ids:
        library.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=ids)


def _longest_match(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer of a file that jaxgpt exported with a tokenizer of characters or bytes."""
    tokens, types, *_ = read_vocabulary(metadata, where)
    texts = [_unescaped(token) for token, kind in zip(tokens, types, strict=True) if kind != UNUSED]
    tokenizer: Tokenizer
    if texts == [bytes([value]) for value in range(256)]:
        tokenizer = ByteTokenizer()
    else:
        characters = [text.decode("utf-8", "replace") for text in texts]
        tokenizer = CharTokenizer(characters)
        if tokenizer.words != characters or any(len(character) != 1 for character in characters):
            raise UserError(f"{where}: {GGML}model 'rwkv' is supported only for characters and bytes; {OTHER}")
    tokenizer.special = read_special_tokens(metadata, where)
    return tokenizer


def escaped(text: bytes) -> str:
    """Write a token as llama.cpp's tokenizer of RWKV reads it: bytes other than plain ASCII as `\\x0a`."""
    plain = set(range(32, 127)) - set(b"\\'\"")
    return "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in text)


def _unescaped(token: str) -> bytes:
    """Invert `escaped`."""
    parts = re.split(r"\\x([0-9a-f]{2})", token)
    return b"".join(bytes([int(part, 16)]) if i % 2 else part.encode() for i, part in enumerate(parts))
