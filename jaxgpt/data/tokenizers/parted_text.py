"""A text that is given in parts, such as the parts of a conversation, and the places of control tokens in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxgpt.data.tokenizers.control_tokens import TokenMatch


class TokenPlace(NamedTuple):
    """The place of a control token in a text that is given in parts."""

    part: int  # index of its part
    begin: int  # index of its first character in the text, including white space that it absorbs within its part
    end: int


class PartedText(NamedTuple):
    """A text that is given in parts."""

    text: str  # all parts
    ends: list[int]  # index of the end of each part

    @staticmethod
    def of(parts: Sequence[str]) -> PartedText:
        """Join parts, and record their ends."""
        return PartedText("".join(parts), list(accumulate(map(len, parts))))

    def part_of(self, index: int) -> int:
        """Return the part with the character at an index."""
        return bisect_right(self.ends, index)

    def begin_of(self, part: int) -> int:
        """Return the index of the first character of a part."""
        return self.ends[part - 1] if part else 0

    def place_of(self, token: TokenMatch) -> TokenPlace:
        """Return the place of a control token.

        A token absorbs white space before it only within its part, because the ids of a part do not depend on later parts.
        """
        found = self.text[token.begin : token.end]
        part = self.part_of(token.end - len(found.lstrip()))
        return TokenPlace(part, max(token.begin, self.begin_of(part)), token.end)

    def bounds(self, begin: int, end: int) -> list[int]:
        """Return the indices from `begin` to `end` at which a part begins, and `begin` and `end`."""
        return [begin, *(at for at in self.ends if begin < at < end), end]
