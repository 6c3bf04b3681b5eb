"""Cut a long text at places that do not change its ids, so that pieces can be encoded in parallel and in bounded memory.

A cut at p is safe if the ids of the text are those of `text[:p]` followed by those of `text[p:]`. For BPE on words found by
a pattern, this holds if a word ends at p whatever follows and the match before p does not look ahead: patterns match from
left to right and have no lookbehind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PIECE = 1 << 16  # characters per piece: enough to keep a core busy, and small compared with a text

# The patterns of Llama 3 and Qwen, as in their tokenizer.json.
LLAMA3 = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)

# Safe cuts. Python's \s is a superset of the library's, so (?<=\S) is strict. A space always ends a word, and the only
# lookahead, `\s+(?!\S)`, cannot apply before it. For scripts without spaces: no pattern joins a letter to a following
# character that is not a letter.
SPACE = r"(?<=\S)(?= )"
IDEOGRAPH_END = r"(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
# GPT-2: only words of white space contain a newline.
GPT2_CUTS = re.compile(rf"{SPACE}|(?<=\S)(?=\n)|{IDEOGRAPH_END}")
# Llama 3: punctuation and `\s*[\r\n]+` include all newlines that follow; a letter or punctuation after them begins a word.
LLAMA3_CUTS = re.compile(rf"{SPACE}|(?<=\n)(?=\S)|{IDEOGRAPH_END}")
SPACE_CUTS = re.compile(SPACE)
# Candidate cuts for an unknown tokenizer.
LIKELY_CUTS = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?=[ \n])")
WORD_CUTS = re.compile(r"\s")  # white space at which `str.split` splits
TRIES = 8  # candidate cuts to try before giving up and encoding the text as one piece
AROUND = 512  # characters of context on each side of a candidate cut

Find = Callable[[str, int], int]  # (text, start) -> the first safe cut at or after `start`, or -1


def cut(text: str, find: Find) -> list[str]:
    """Cut a text at the first safe place after every `PIECE` characters. Returns at least one piece, which may be empty."""
    pieces, start = [], 0
    while len(text) - start > PIECE and (end := find(text, start + PIECE)) > 0:
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def rejoin(blocks: Iterable[str], find: Find) -> Iterator[list[str]]:
    """Cut a text given as blocks, which may end anywhere, into pieces. Yields a list of pieces per block, then the rest."""
    rest = ""
    for block in blocks:
        *pieces, rest = cut(rest + block, find)
        if pieces:
            yield pieces
    if rest:
        yield [rest]


def find_by(pattern: re.Pattern[str]) -> Find:
    """Make a function that finds the cuts matched by a pattern."""

    def find(text: str, start: int) -> int:
        found = pattern.search(text, start)
        return found.start() if found else -1

    return find


def find_any(text: str, start: int) -> int:
    """Allow a cut anywhere."""
    return start if start < len(text) else -1


def find_tried(encode: Callable[[list[str]], list[list[int]]]) -> Find:
    """Make a function that finds cuts for an unknown tokenizer by trial.

    The boundary of a line or word is assumed to be safe if the `AROUND` characters on each side of it have the same ids
    together and apart. This detects a prefix added to every text and rules about the neighborhood of the cut (words, white
    space), but not a dependence on more distant text. After `TRIES` failures in a row, texts are no longer cut.
    """
    failed = 0

    def find(text: str, start: int) -> int:
        nonlocal failed
        for place in LIKELY_CUTS.finditer(text, start, max(len(text) - AROUND, start)):
            if failed >= TRIES:
                return -1
            p = place.start()
            before, after = text[max(p - AROUND, 0) : p], text[p : p + AROUND]
            whole, left, right = encode([before + after, before, after])
            if whole == left + right:
                failed = 0
                return p
            failed += 1
        return -1

    return find


def known_cuts(tokenizer_json: str) -> re.Pattern[str] | None:
    """Return the safe cuts of a tokenizer.json, or None if they are not known.

    They are known for the patterns of GPT-2, Llama 3 and Qwen, without a prefix added to the text and without normalization
    other than NFC, which never combines characters across these cuts.
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
    return SPACE_CUTS if added and pattern else pattern


def split_by(pattern: str) -> dict[str, Any]:
    """Return the tokenizer.json entry that splits by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _keeps_words(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenization step finds the same words in a piece as in the whole text."""
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    return any(step == split_by(pattern) for pattern in LLAMA3)
