"""Control tokens: find them, and separate the tokens of a template from their names in messages.

A name in a message gets a mark, a character that occurs nowhere else: `<` + mark + `|im_end|>`. The mark survives a
template that trims, splits or joins messages. In the rendered text, only names without a mark are control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.base import Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

# Candidates for the mark: noncharacters, then private characters. Python's and Jinja's functions keep them unchanged.
MARKS = [chr(point) for point in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))]


class TokenMatch(NamedTuple):
    """A control token in a text."""

    begin: int  # index of its first character, including white space that the token absorbs
    end: int
    id: int


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and further added tokens by name.

    Args:
        tokenizer: any tokenizer; tokenizers of bytes or characters have no control tokens.
        further: names of added tokens that are control tokens although they are not special, or, for a tokenizer of
            words, names of words.

    Attributes:
        names: name of each control token, keyed by id.
        normalized: ids of tokens with names that match other spellings, such as capitals.
        has_single_words: whether any token is found only as a separate word (`single_word`).
    """

    def __init__(self, tokenizer: Tokenizer, further: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.further = frozenset(further)
        self.names = dict[int, str]()
        self.normalized = set[int]()
        self.has_single_words = False
        if isinstance(tokenizer, SubwordTokenizer):
            for i, token in tokenizer.library.get_added_tokens_decoder().items():
                if token.special or token.content in self.further:
                    self.names[i] = token.content
                    if token.normalized:
                        self.normalized.add(i)
                    self.has_single_words |= token.single_word
        elif type(tokenizer) is WordTokenizer:
            self.names = {i: word for i, word in enumerate(tokenizer.words) if word in self.further}
        self._first = frozenset(name[0] for name in self.names.values())

    def find(self, text: str) -> list[TokenMatch]:
        """Find the control tokens of a text, as the tokenizer recognizes them."""
        if not isinstance(self.tokenizer, SubwordTokenizer):
            return []
        encoding = self.tokenizer.encode_offsets(text)
        matches = []
        for i, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # The id of `<unk>` also encodes unknown characters, which are ordinary text.
            if i in self.names and self._spelling(text[begin:end]) == self._spelling(self.names[i]):
                matches.append(TokenMatch(begin, end, i))
        return matches

    def _spelling(self, name: str) -> str:
        """Return a normal form of a name: equal for all spellings that match a token, and without white space at the ends."""
        assert isinstance(self.tokenizer, SubwordTokenizer)
        normalizer = self.tokenizer.library.normalizer
        if self.normalized and normalizer is not None:
            name = normalizer.normalize_str(name.strip())
        return name.strip()

    def protect(self, value: Any, mark: str, kept: Collection[str] = (), markup: Collection[str] | None = None) -> Any:
        """Copy a JSON value with a mark in each name of a control token.

        Args:
            value: string, list, dict or other JSON value.
            mark: character to insert after the first character of a name.
            kept: names that stay control tokens.
            markup: if not None, also insert the mark after every character that begins a name, because a template may join
                parts of names. Strings in `markup`, which the template may look for, stay unchanged.

        Raises:
            UserError: if a tokenizer of words cannot represent a name as text.
        """
        if isinstance(value, str):
            return self._protect_text(value, mark, kept, markup)
        if isinstance(value, dict):
            keys = [self.protect(key, mark, kept, markup) for key in value]
            values = [self.protect(item, mark, kept, markup) for item in value.values()]
            return dict(zip(keys, values, strict=True))
        if isinstance(value, (list, tuple)):
            return [self.protect(item, mark, kept, markup) for item in value]
        return value

    def _protect_text(self, text: str, mark: str, kept: Collection[str], markup: Collection[str] | None) -> str:
        """Copy a text with marks; arguments as in `protect`."""
        if not self.normalized and self._first.isdisjoint(text):
            return text
        if not isinstance(self.tokenizer, SubwordTokenizer):
            self._check_words(text, kept)
            return text

        inside = set[int]()  # indices before which marks are inserted
        unchanged = list[range]()  # indices inside of kept names
        for match in self.find(text):
            if self.names[match.id] in kept:
                unchanged.append(range(match.begin + 1, match.end))
                continue
            name = text[match.begin : match.end].lstrip()
            inside.add(match.end - len(name) + 1)

        if markup is not None:
            # Mark every character that begins a name, except in strings of `markup`; the longest string is matched first.
            others = sorted(markup, key=len, reverse=True)
            pattern = "|".join(map(re.escape, [*others, *self._first]))
            for found in re.finditer(pattern, text):
                if found[0] in self._first:
                    inside.add(found.end())

        inside = {index for index in inside if not any(index in name for name in unchanged)}
        bounds = [0, *sorted(inside), len(text)]
        return mark.join(text[begin:end] for begin, end in pairwise(bounds))

    def _check_words(self, text: str, kept: Collection[str]) -> None:
        """Raise `UserError` if a word of a text is the name of a control token: a tokenizer of words cannot mark it."""
        for word in text.split():
            if word in self.names.values() and word not in kept:
                raise not_text(word)

    def unmarked(self, text: str, mark: str) -> list[TokenMatch]:
        """Find the control tokens of a text, except names with a mark."""
        matches = self.find(text)
        if mark:
            matches = [match for match in matches if mark not in text[match.begin : match.end]]
        return matches


def unused_mark(values: Iterable[Any]) -> str:
    """Return a character that occurs in none of the JSON values."""
    used = set[str]()
    for value in values:
        for text in _strings(value):
            used.update(text)
    return next(mark for mark in MARKS if mark not in used)


def not_text(name: str) -> UserError:
    """Return the error for a name in a message that cannot be encoded as text."""
    return UserError(f"the tokenizer cannot encode {name} in a message as text: remove it from the message")


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
