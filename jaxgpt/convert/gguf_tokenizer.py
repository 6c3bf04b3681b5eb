"""Tokenizers of GGUF files: byte-level BPE with llama.cpp's pre-tokenizers, and SentencePiece BPE."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.data.cuts import GPT2, LLAMA3
from jaxgpt.data.special import SpecialTokens
from jaxgpt.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    SubwordTokenizer,
    Tokenizer,
    byte_level,
    call_tokenizers,
)
from jaxgpt.errors import UserError, short_repr

GGML = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"  # with a dot and a name: a template with this name
TEMPLATES = "tokenizer.chat_templates"  # names of templates

# llama.cpp token types.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # the space of SentencePiece
PADDING = re.compile(r"\[PAD\d+\]")  # unused tokens that a converter adds to fill the vocabulary
OTHER = "pass the model's tokenizer.json with --tokenizer"

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

# Keys of special tokens in the metadata, and their names in transformers.
SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "pad": "padding_token_id",
    "unk": "unknown_token_id",
}
NO_TOKEN = 2**32 - 1  # llama.cpp's -1 as an unsigned integer, for a special token that the model lacks
SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}  # defaults of the tokenizer "llama"
# Control tokens that end a turn; llama.cpp recognizes them by name.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>")


class Vocabulary(NamedTuple):
    """The tokens of a file."""

    tokens: list[str]  # text of each id
    types: list[int]  # type of each id
    scores: list[float]  # score of each id; empty: the file has no scores
    merges: list[tuple[str, str]]  # pairs of tokens, in order


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
    vocabulary = _read_vocabulary(metadata, where)
    special = read_special_tokens(metadata, where)

    prefix = _flag(metadata, "add_space_prefix", True, where)
    add_bos = _flag(metadata, "add_bos_token", words.bos, where)
    add_eos = _flag(metadata, "add_eos_token", False, where)

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


def read_special_tokens(metadata: Mapping[str, Any], where: str) -> SpecialTokens:
    """Read the special tokens and the chat template of a GGUF file.

    Raises:
        UserError: if the id of a token is not an integer below the number of tokens.
    """
    tokens = _array(metadata, "tokens", str, where)
    types = _array(metadata, "token_type", int, where)
    template = _templates(metadata)
    names: dict[str, Any] = {} if template is None else {"chat_template": template}
    if not tokens:
        return SpecialTokens({}, names)
    ids = _special_ids(metadata, tokens, where)
    turn_ends = [i for i, token in enumerate(tokens) if token in TURN_ENDS and types[i : i + 1] == [CONTROL]]

    generation: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends = list(dict.fromkeys(ends + turn_ends))
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    names |= {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad", "unk") if name in ids}
    return SpecialTokens(generation, names)


def _templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the chat template of a file, several as a list of names and templates, or None."""
    named = list[dict[str, str]]()
    for key, value in metadata.items():
        if isinstance(value, str) and key.startswith(f"{TEMPLATE}."):
            named.append({"name": key.removeprefix(f"{TEMPLATE}."), "template": value})
    default = metadata.get(TEMPLATE)
    if not isinstance(default, str):
        return named or None
    return [{"name": "default", "template": default}, *named] if named else default


def _special_ids(metadata: Mapping[str, Any], tokens: list[str], where: str) -> dict[str, int]:
    """Return the ids of special tokens, keyed by the names in `SPECIAL`."""
    ids: dict[str, int] = {}
    if metadata.get(f"{GGML}model") == "llama":
        ids = {name: i for name, i in SENTENCEPIECE_IDS.items() if i < len(tokens)}
    for name, key in SPECIAL.items():
        value = metadata.get(f"{GGML}{key}")
        if value is None or value == NO_TOKEN:
            continue
        if type(value) is not int or not 0 <= value < len(tokens):
            raise UserError(f"{where}: {GGML}{key} must be an id below {len(tokens)}: {short_repr(value)}; {OTHER}")
        ids[name] = value
    return ids


def _words(metadata: Mapping[str, Any], where: str) -> Words:
    """Return the pre-tokenizer of a byte-level BPE."""
    name = metadata.get(f"{GGML}pre", "default")
    if name == "default" and metadata.get("general.architecture") in NAMELESS:
        name = "gpt-2"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{where}: {GGML}pre {short_repr(name)} is not supported: expected one of {known}; {OTHER}")
    return PRE_TOKENIZERS[name]


def _read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Read and check the tokens, their types and scores, and the merges."""
    tokens = _array(metadata, "tokens", str, where)
    types = _array(metadata, "token_type", int, where) or [NORMAL] * len(tokens)
    scores = _array(metadata, "scores", float, where)
    merges = _array(metadata, "merges", str, where)

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


def _pair(merge: str, where: str) -> tuple[str, str]:
    middle = merge.find(" ", 1)  # a token may begin with a space
    if middle < 0 or middle == len(merge) - 1:
        problem = f"{short_repr(merge)} in {GGML}merges is not two tokens separated by a space"
        raise UserError(f"{where}: {problem}; {OTHER}")
    return merge[:middle], merge[middle + 1 :]


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids of the tokens with a text, without padding."""
    ids = {}
    for i, token in enumerate(vocabulary.tokens):
        is_padding = vocabulary.types[i] == UNUSED and PADDING.fullmatch(token)
        if token and not is_padding:
            ids[token] = i
    return ids


def _byte_level(vocabulary: Vocabulary, words: Words) -> Any:
    """Build a byte-level BPE that splits a text into words."""
    from tokenizers import Regex, pre_tokenizers

    library = byte_level(_ids(vocabulary), vocabulary.merges)
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
        _ids(vocabulary),
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
    ids = _ids(vocabulary)
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
    tokens, types, *_ = _read_vocabulary(metadata, where)
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


def _flag(metadata: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    value = metadata.get(f"{GGML}{name}", default)
    if type(value) is not bool:
        raise UserError(f"{where}: {GGML}{name} must be true or false: {short_repr(value)}; {OTHER}")
    return value


def _array(metadata: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    value = metadata.get(f"{GGML}{name}", [])
    if not isinstance(value, list) or not all(type(each) is kind for each in value):
        problem = f"{GGML}{name} must be an array of type {kind.__name__}: {short_repr(value)}"
        raise UserError(f"{where}: {problem}; {OTHER}")
    return value
