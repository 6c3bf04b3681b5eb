"""A text that is given in parts, such as the parts of a conversation: find the part of a character."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class PartedText(NamedTuple):
    """A text that is given in parts; indices of characters are indices in the joined text."""

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

    def bounds(self, begin: int, end: int) -> list[int]:
        """Return the indices from `begin` to `end` at which a part begins, and `begin` and `end`."""
        return [begin, *(at for at in self.ends if begin < at < end), end]
