"""Marks in the names of control tokens: separate the tokens of a template from their names in messages.

A name in a message gets a mark, a character that occurs nowhere else: `<` + mark + `|im_end|>`. The mark survives a
template that trims, splits or joins messages. In the rendered text, only names without a mark are control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.control_tokens import ControlTokens, TokenMatch
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

# Candidates for the mark: noncharacters, then private characters. Python's and Jinja's functions keep them unchanged.
MARKS = [chr(point) for point in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))]


class Marking(NamedTuple):
    """The mark, and the places that get it.

    Attributes:
        mark: character to insert after the first character of a name.
        kept: names that stay control tokens.
        is_thorough: whether every character that begins a name gets a mark after it, even without the other characters of
            the name, because a template may join parts of names.
        markup: strings that thorough marks do not change, because the template may look for them.
    """

    mark: str
    kept: Collection[str] = ()
    is_thorough: bool = False
    markup: Collection[str] = ()


def unused_mark(values: Iterable[Any]) -> str:
    """Return a character that occurs in none of the JSON values."""
    used = set[str]()
    for value in values:
        for text in _strings(value):
            used.update(text)
    return next(mark for mark in MARKS if mark not in used)


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def protect(control: ControlTokens, value: Any, marking: Marking) -> Any:
    """Copy a JSON value with a mark in each name of a control token.

    Args:
        control: the control tokens of the tokenizer.
        value: string, list, dict or other JSON value.
        marking: the mark, and the strings that get it.

    Raises:
        UserError: if a tokenizer of words cannot represent a name as text.
    """
    if isinstance(value, str):
        return _protect_text(control, value, marking)
    if isinstance(value, dict):
        keys = [protect(control, key, marking) for key in value]
        items = [protect(control, item, marking) for item in value.values()]
        return dict(zip(keys, items, strict=True))
    if isinstance(value, (list, tuple)):
        return [protect(control, item, marking) for item in value]
    return value


def _protect_text(control: ControlTokens, text: str, marking: Marking) -> str:
    """Copy a text with marks."""
    if not control.normalized and control.first_characters.isdisjoint(text):
        return text
    if not isinstance(control.tokenizer, SubwordTokenizer):
        _check_words(control, text, marking.kept)
        return text

    places = set[int]()  # indices before which marks are inserted
    unchanged = list[range]()  # indices inside kept names
    for match in control.find(text):
        if control.names[match.id] in marking.kept:
            unchanged.append(range(match.begin + 1, match.end))
            continue
        places.add(match.name_begin + 1)

    if marking.is_thorough:
        places |= _first_characters(control, text, marking.markup)
    places = {place for place in places if not any(place in name for name in unchanged)}
    bounds = [0, *sorted(places), len(text)]
    return marking.mark.join(text[begin:end] for begin, end in pairwise(bounds))


def _first_characters(control: ControlTokens, text: str, markup: Collection[str]) -> set[int]:
    """Return the index after every character that begins a name, except in strings of `markup`."""
    longest_first = sorted(markup, key=len, reverse=True)
    pattern = "|".join(map(re.escape, [*longest_first, *control.first_characters]))
    return {found.end() for found in re.finditer(pattern, text) if found[0] in control.first_characters}


def _check_words(control: ControlTokens, text: str, kept: Collection[str]) -> None:
    """Raise `UserError` if a word of a text is the name of a control token: a tokenizer of words cannot mark it."""
    for word in text.split():
        if word in control.names.values() and word not in kept:
            raise not_text(word)


def unmarked(control: ControlTokens, text: str, mark: str) -> list[TokenMatch]:
    """Find the control tokens of a text, except names with the mark; `mark` "": names have no marks."""
    matches = control.find(text)
    if mark:
        matches = [match for match in matches if mark not in text[match.begin : match.end]]
    return matches


def not_text(name: str) -> UserError:
    """Return the error for a name in a message that cannot be encoded as text."""
    return UserError(f"the tokenizer cannot encode {name} in a message as text: remove it from the message")
