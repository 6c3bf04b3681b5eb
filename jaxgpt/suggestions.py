"""Suggestions for a misspelled word: the most similar known word.

This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

COMPARED_CHARACTERS = 100  # maximum length of a word to compare with known words; the time grows with its square


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean X?)"`, or an empty string if no known word is similar."""
    near = nearest(word, known)
    return f" (did you mean {near[0]}?)" if near else ""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the most similar known word, otherwise the known words that it abbreviates, otherwise []."""
    words = list(known)
    similar = []
    if len(word) < COMPARED_CHARACTERS:
        similar = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    return similar or [each for each in words if is_abbreviation(word, each)]


def is_abbreviation(short: str, name: str) -> bool:
    """Return whether a string has the first letter of each part of a name: lr of learning_rate."""
    letters = "".join(re.findall(r"(?:^|[-_])(.)", name))
    return len(short) > 1 and short == letters
