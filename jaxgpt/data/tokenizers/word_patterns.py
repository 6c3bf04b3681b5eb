"""Patterns that split a text into words, in the `pre_tokenizer` of a tokenizer.json."""

from __future__ import annotations

from typing import Any

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"


def _llama3(numbers: str) -> str:
    """Return Llama 3's pattern with a different pattern of numbers."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


LLAMA3 = _llama3(r"\p{N}{1,3}")
QWEN = _llama3(r"\p{N}")


def split_by(pattern: str) -> dict[str, Any]:
    """Return the tokenizer.json entry that splits by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def word_pattern(pre_tokenizer: Any) -> str:
    """Return the word pattern of a `pre_tokenizer` of tokenizer.json: GPT-2's, Llama 3's or Qwen's; otherwise ""."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {"pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}:
            return next((pattern for pattern in (LLAMA3, QWEN) if split == split_by(pattern)), "")
    return ""


def pattern_after_digits(pre_tokenizer: Any) -> str:
    """Return the word pattern of a `pre_tokenizer` that splits off digits first, such as SmolLM2's; otherwise ""."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, words]}:
            return word_pattern(words)
    return ""
