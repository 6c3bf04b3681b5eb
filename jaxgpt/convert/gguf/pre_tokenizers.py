"""llama.cpp's pre-tokenizers, which split a text into words before the merges, by the name in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.convert.gguf.vocabulary import GGML, OTHER
from jaxgpt.data.tokenizers.word_patterns import GPT2, LLAMA3, QWEN, word_pattern
from jaxgpt.errors import UserError, short_repr

# Patterns of pre-tokenizers, as in the tokenizer.json files of the models.
DIGIT = r"\p{N}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGIT)


class PreTokenizer(NamedTuple):
    """A llama.cpp pre-tokenizer.

    Attributes:
        patterns: patterns that split a text into words; each splits the results of the previous pattern.
        ignores_merges: whether a word in the vocabulary is one token, regardless of the merges.
        adds_bos: default of `add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


OF_GPT2 = PreTokenizer((GPT2,))
OF_SMOLLM = PreTokenizer((DIGIT, GPT2))
OF_LLAMA3 = PreTokenizer((LLAMA3,), ignores_merges=True, adds_bos=True)
OF_DBRX = PreTokenizer((LLAMA3,))
OF_QWEN = PreTokenizer((QWEN,))

# Map from values of tokenizer.ggml.pre, in files of the supported families, to pre-tokenizers.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys("gpt-2 olmo mpt phi-2 trillion granite-docling gigachat exaone4 mellum a.x-4.0".split(), OF_GPT2),
    **dict.fromkeys("smollm starcoder refact codeshell minerva-7b mellum2".split(), OF_SMOLLM),
    **dict.fromkeys("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2".split(), OF_LLAMA3),
    **dict.fromkeys("dbrx smaug-bpe".split(), OF_DBRX),
    **dict.fromkeys("qwen2 deepseek-r1-qwen megrez kormo stablelm2 solar-open".split(), OF_QWEN),
    # This is the pattern of tokenizer.json. llama.cpp's pattern splits differently at combining marks, and where the case of
    # letters outside ASCII changes.
    "tekken": PreTokenizer((TEKKEN,), ignores_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
}
NAMELESS = ("gpt2", "gptneox")  # architectures whose files without tokenizer.ggml.pre have the pre-tokenizer of GPT-2
DIGITS = {"type": "Digits", "individual_digits": True}  # in tokenizer.json, a split at each digit


def read_pre_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    """Return the pre-tokenizer named in a file; raise `UserError` if it is not supported."""
    name = metadata.get(f"{GGML}pre", "default")
    if name == "default" and metadata.get("general.architecture") in NAMELESS:
        name = "gpt-2"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{where}: {GGML}pre {short_repr(name)} is not supported: expected one of {known}; {OTHER}")
    return PRE_TOKENIZERS[name]


def pre_tokenizer_name(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a tokenizer.json, or "" if jaxgpt knows no equivalent.

    NFC is the only accepted normalizer, although llama.cpp does not apply it.
    """
    if (content["normalizer"] or {}).get("type") not in (None, "NFC"):
        return ""
    pre_tokenizer = content["pre_tokenizer"] or {}
    match pre_tokenizer.get("pretokenizers"):
        case [first, words] if first == DIGITS:
            return "smollm" if word_pattern(words) == GPT2 else ""

    pattern = word_pattern(pre_tokenizer)
    if pattern == GPT2:
        return "gpt-2"
    if pattern == LLAMA3:
        return "llama-bpe" if content["model"]["ignore_merges"] else "dbrx"
    if pattern == QWEN:
        return "qwen2"
    return ""
