"""Places to cut a long text without changing its ids, so that pieces can be encoded in parallel.

A cut at p is safe if the ids of the text are the ids of `text[:p]` followed by the ids of `text[p:]`. For BPE on words found
by a pattern, this holds if a word ends at p regardless of the text after p, and the match before p does not look ahead.
"""

from __future__ import annotations

import json
import re
from typing import Any

PIECE = 1 << 16  # characters of a piece: enough to keep a core busy

# Word patterns of Llama 3 and Qwen, as in their tokenizer.json.
LLAMA3 = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)

# Python's \s is a superset of the library's, so (?<=\S) is strict. A space always ends a word, and the only lookahead,
# `\s+(?!\S)`, cannot apply before it. Without spaces: no pattern joins a letter to a following character that is not a letter.
SPACE = r"(?<=\S)(?= )"
IDEOGRAPH_END = r"(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
ANYWHERE = re.compile("")
WHITESPACE = re.compile(r"\s")  # as in `str.split`
SPACES = re.compile(SPACE)
# GPT-2: only words of white space contain a newline.
GPT2_CUTS = re.compile(rf"{SPACE}|(?<=\S)(?=\n)|{IDEOGRAPH_END}")
# Llama 3: punctuation and `\s*[\r\n]+` include all newlines that follow; a letter or punctuation after them begins a word.
LLAMA3_CUTS = re.compile(rf"{SPACE}|(?<=\n)(?=\S)|{IDEOGRAPH_END}")

Cuts = re.Pattern[str] | None  # matches at safe cuts; None: no safe cut is known


def cut(text: str, cuts: Cuts) -> list[str]:
    """Cut a text at the first safe place after every `PIECE` characters. Returns at least one piece, which may be empty."""
    pieces, start = [], 0
    while cuts and len(text) - start > PIECE and (found := cuts.search(text, start + PIECE)):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def known_cuts(tokenizer_json: str) -> Cuts:
    """Return the safe cuts of a tokenizer.json with the word pattern of GPT-2, Llama 3 or Qwen; None for other patterns.

    A prefix of the text and normalization other than NFC, which never combines characters across these cuts, are unsafe.
    """
    data = json.loads(tokenizer_json)
    splitter = data.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    # Added tokens are matched before the text is split into words, so they may span a cut.
    added = [token for token in data["added_tokens"] if not token["special"]]
    if any(token["rstrip"] or any(map(str.isspace, token["content"])) for token in added):
        return None
    if (data["normalizer"] or {}).get("type") not in (None, "NFC") or not all(map(_keeps_words, steps)):
        return None
    # The first step finds the words; later steps process one word at a time.
    pattern = GPT2_CUTS if steps[0].get("use_regex") else LLAMA3_CUTS if steps[0]["type"] == "Split" else None
    return SPACES if added and pattern else pattern


def split_by(pattern: str) -> dict[str, Any]:
    """Return the tokenizer.json entry that splits by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _keeps_words(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenization step finds the same words in a piece as in the complete text."""
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    return any(step == split_by(pattern) for pattern in LLAMA3)
