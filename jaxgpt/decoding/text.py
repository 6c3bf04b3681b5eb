"""Ids to text as they come: never half a character, nothing of what may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are no character, or not yet one

FinishReason = Literal["stop", "length"]


class TextStream:
    """The text of one row. Pieces joined are the text, however the ids are cut into portions.

    Attributes:
        ids: those so far; in the end those of the text, without what ended it.
        text: what has been given out.
        finish_reason: None while the row goes on.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        limit: int,
        stop_ids: Iterable[int] = (),
        stops: Iterable[str] = (),
    ) -> None:
        """Nothing yet.

        Args:
            decode: ids to text.
            limit: at most so many ids.
            stop_ids: each ends the row and is no part of it.
            stops: each ends the row where it begins.
        """
        self._decode, self._limit = decode, limit
        self._stop_ids, self._stops = frozenset(stop_ids), tuple(stops)
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def add(self, ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that is certain now."""
        if self.finish_reason:
            return ""
        for i in ids:
            if i in self._stop_ids:
                self.finish_reason = "stop"
                break
            self.ids.append(i)
            if len(self.ids) == self._limit:
                self.finish_reason = "length"
                break
        text = self._decode(self.ids)
        end = self._stop(text)
        if end is not None:
            self.finish_reason, text = "stop", text[:end]
            self._forget_beyond(text)
        elif self.finish_reason is None:
            text = text[: self._certain(text)]
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _stop(self, text: str) -> int | None:
        """Where the stop string begins that was complete first."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _certain(self, text: str) -> int:
        """How much of the text no further token can change."""
        end = len(text)
        # Of a character of four bytes three may be there, and some decoders show each.
        while end > max(len(text) - 3, 0) and text[end - 1] == UNFINISHED:
            end -= 1
        held = max((_overlap(text[:end], stop) for stop in self._stops), default=0)
        return max(end - held, len(self.text))

    def _forget_beyond(self, text: str) -> None:
        """Keep the fewest ids whose text begins with this one."""
        while self.ids and self._decode(self.ids[:-1]).startswith(text):
            self.ids.pop()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
