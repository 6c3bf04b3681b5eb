"""Places to cut a long text without changing its ids, so that pieces can be encoded in parallel.

A cut at p is safe if the ids of the text are the ids of `text[:p]` followed by the ids of `text[p:]`. For BPE on words found
by a pattern, this holds if the cut does not change the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxgpt.data.tokenizers.word_patterns import GPT2, pattern_after_digits, word_pattern

PIECE = 1 << 16  # minimum characters per piece, except the last

# Python's \s is a superset of \s in tokenizers, so every \S in Python is a \S in tokenizers. A word ends between \S and a
# space, and the only lookahead, `\s+(?!\S)`, matches only white space. `IDEOGRAPH_END`: no pattern joins a letter to a
# following non-letter.
SPACE = r"(?<=\S)(?= )"
IDEOGRAPH_END = r"(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
Cuts = re.Pattern[str] | None  # pattern that matches at safe cuts; None: no cut is known to be safe

ANYWHERE = re.compile("")
WHITESPACE = re.compile(r"\s")  # white space as in `str.split`
# GPT-2: only words of white space contain a newline.
GPT2_CUTS = re.compile(rf"{SPACE}|(?<=\S)(?=\n)|{IDEOGRAPH_END}")
# Llama 3: words of punctuation and `\s*[\r\n]+` include all newlines that follow; a \S after the newlines begins a word.
LLAMA3_CUTS = re.compile(rf"{SPACE}|(?<=\n)(?=\S)|{IDEOGRAPH_END}")


def cut(text: str, cuts: Cuts) -> list[str]:
    """Cut a text at the first safe place after every `PIECE` characters, into at least one piece."""
    pieces = []
    start = 0
    while cuts and len(text) - start > PIECE:
        found = cuts.search(text, start + PIECE)
        if not found:
            break
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def known_cuts(tokenizer_json: Mapping[str, Any]) -> Cuts:
    """Return the pattern of safe cuts for a tokenizer.json, or None if no cut is known to be safe.

    NFC never combines characters across these cuts; a cut may be unsafe with other normalizations.
    """
    pre_tokenizer = tokenizer_json["pre_tokenizer"]
    pattern = word_pattern(pre_tokenizer) or pattern_after_digits(pre_tokenizer)
    normalizer = tokenizer_json["normalizer"] or {}
    if not pattern or normalizer.get("type") not in (None, "NFC"):
        return None

    # Added tokens that are not special are matched before the text is split into words, so they may span a cut.
    added = [token for token in tokenizer_json["added_tokens"] if not token["special"]]
    if any(token["rstrip"] or any(map(str.isspace, token["content"])) for token in added):
        return None
    if added:
        return re.compile(SPACE)
    return GPT2_CUTS if pattern == GPT2 else LLAMA3_CUTS
