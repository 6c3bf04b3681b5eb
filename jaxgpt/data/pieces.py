"""Cut a long text where that does not change its ids, so that pieces can be encoded one at a time and in parallel.

A cut at p is safe if the ids of the whole are those of `text[:p]` followed by those of `text[p:]`. For BPE over words that
a pattern finds, this holds where a word ends at p whatever follows, and where nothing in the match before p looks ahead:
patterns match from left to right and none looks behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PIECE = 1 << 16  # characters of a piece: enough to keep a core busy, and small beside a text

# The patterns of Llama 3 and Qwen as tokenizer.json has them.
LLAMA3 = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)

# Safe cuts. Python's \s is a superset of the library's, so (?<=\S) is strict. A word never goes on over a space; before it,
# the only lookahead, `\s+(?!\S)`, is not in use. For scripts without spaces: no pattern joins a letter and what follows it
# unless that is a letter.
SPACE = r"(?<=\S)(?= )"
IDEOGRAPH_END = r"(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
# GPT-2: no word but white space holds a newline.
GPT2_CUTS = re.compile(rf"{SPACE}|(?<=\S)(?=\n)|{IDEOGRAPH_END}")
# Llama 3: punctuation takes the newlines behind it, all of them, and so does `\s*[\r\n]+`; letters and punctuation that
# follow begin a word.
LLAMA3_CUTS = re.compile(rf"{SPACE}|(?<=\n)(?=\S)|{IDEOGRAPH_END}")
SPACE_CUTS = re.compile(SPACE)
# Where a cut is tried in a text of an unknown tokenizer.
LIKELY_CUTS = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?=[ \n])")
WORD_CUTS = re.compile(r"\s")  # the white space at which `str.split` divides
TRIES = 8  # likely cuts that are tried before a text is taken to be one piece
AROUND = 512  # characters before and after a cut that is tried

Find = Callable[[str, int], int]  # (text, from): the first safe cut at or after `from`, -1 if there is none


def cut(text: str, find: Find) -> list[str]:
    """Cut a text at the first safe place after every `PIECE` characters; at least one piece, which may be empty."""
    pieces, start = [], 0
    while len(text) - start > PIECE and (end := find(text, start + PIECE)) > 0:
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def rejoin(blocks: Iterable[str], find: Find) -> Iterator[list[str]]:
    """Cut a text that comes in blocks, which end anywhere, into lists of pieces: a list for each block, and the rest."""
    rest = ""
    for block in blocks:
        *pieces, rest = cut(rest + block, find)
        if pieces:
            yield pieces
    if rest:
        yield [rest]


def find_by(pattern: re.Pattern[str]) -> Find:
    """Find the cuts that a pattern matches."""

    def find(text: str, start: int) -> int:
        found = pattern.search(text, start)
        return found.start() if found else -1

    return find


def find_any(text: str, start: int) -> int:
    """Cut anywhere."""
    return start if start < len(text) else -1


def find_tried(encode: Callable[[list[str]], list[list[int]]]) -> Find:
    """Find cuts for a tokenizer of which nothing is known, by trying.

    A place at which lines or words begin or end is taken for safe if the `AROUND` characters on both sides of it have the
    same ids together and apart. That finds what depends on where a text begins (a mark put before its first word) and on
    the neighbourhood of a cut (a word, a rule for white space); what depends on more distant text it cannot find. A tokenizer
    of which `TRIES` places in a row fail gets whole texts from then on.
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
    """The safe cuts of a tokenizer.json, None if they are not known.

    Known are the words of GPT-2's, Llama 3's and Qwen's patterns, with nothing put before a text, and no other
    normalization than NFC, which joins no two characters over any of these cuts.
    """
    data = json.loads(tokenizer_json)
    splitter = data.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    # Tokens that are looked for in the text itself, before it is split, may reach over a cut.
    added = [token for token in data["added_tokens"] if not token["special"]]
    if any(token["rstrip"] or any(map(str.isspace, token["content"])) for token in added):
        return None
    if (data["normalizer"] or {}).get("type") not in (None, "NFC") or not all(map(_keeps_words, steps)):
        return None
    # The first step finds the words; others look at one word at a time.
    pattern = GPT2_CUTS if steps[0].get("use_regex") else LLAMA3_CUTS if steps[0]["type"] == "Split" else None
    return SPACE_CUTS if added and pattern else pattern


def split_by(pattern: str) -> dict[str, Any]:
    """A splitting by a pattern, as tokenizer.json says it."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _keeps_words(step: dict[str, Any]) -> bool:
    """Whether a step of the splitting finds the same words in a piece of a text as in the whole."""
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    return any(step == split_by(pattern) for pattern in LLAMA3)
