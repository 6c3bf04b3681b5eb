"""Suggestions for a misspelled word or setting: the most similar known name.

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


def similar_setting(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown setting, a list of a section's settings, or "".

    `name` and `known` are dotted names (train.steps) or options (--train.steps).

        train.stpes -> " (did you mean train.steps?)"
        train.window -> " (did you mean data.window?)"
        mesh, mesh.unknown -> " (settings of mesh: data, fsdp, expert, context, tensor)"
    """
    section, last = _section_and_last(name)
    parts = {each: _section_and_last(each) for each in known}
    listed_section = section or last
    of_section = [tail for place, tail in parts.values() if place == listed_section]

    near = nearest(last, [tail for _, tail in parts.values()])
    is_section = not section and bool(of_section)
    if near and not is_section:
        similar = [each for each, (_, tail) in parts.items() if tail in near]
        of_same_section = [each for each in similar if parts[each][0] == section]
        return f" (did you mean {' or '.join(of_same_section or similar)}?)"
    if of_section:
        return f" (settings of {listed_section}: {', '.join(of_section)})"
    return ""


def _section_and_last(name: str) -> tuple[str, str]:
    """Split --train.steps into train and steps; the section may be ""."""
    section, _, last = name.lstrip("-").rpartition(".")
    return section, last
