"""Decode ids to text incrementally, holding back incomplete characters and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from jaxgpt.data.tokenizers.base import Ids
from jaxgpt.decoding.sampling import DIVERGED, NOT_A_NUMBER
from jaxgpt.errors import UserError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # text of bytes that are not a complete character; later bytes may complete it

FinishReason = Literal["stop", "length", "exhausted"]


class Decoder(Protocol):
    """Converts ids to text; every `Tokenizer` is a decoder."""

    def decode(self, ids: Ids) -> str:
        """Convert ids to text."""
        ...

    def settled(self, ids: list[int]) -> list[int]:
        """Return a prefix of the ids with a text that further ids cannot change."""
        ...


class TextStream:
    """Incrementally decoded text of one row, independent of how the ids are split over calls.

    Prompt and new ids are decoded together: a decoder may strip the first space of a text, or combine bytes across the
    boundary into one character. The new text is the part after the text of the prompt.

    Attributes:
        ids: new ids so far, without a stop id; after a stop string, the shortest prefix with all of `text`.
        log_p: log probability of each of `ids`, and of `stop_id`.
        stop_id: the stop id that ended the row, or None.
        text: text returned so far.
        finish_reason: as in `Generation`; None while generation continues.
    """

    def __init__(
        self,
        decoder: Decoder,
        limit: int,
        stop_ids: Iterable[int] = (),
        stops: Iterable[str] = (),
        *,
        prompt: Sequence[int] = (),
    ) -> None:
        """Start a row of at most `limit` new ids; `stop_ids` and `stops` end the row and are omitted."""
        self._decode = decoder.decode
        self._settled_ids = decoder.settled
        self._limit = limit
        self._stop_ids = frozenset(stop_ids)
        self._stops = tuple(stops)
        self._prompt = list(prompt)
        self._before = self._decode(self._prompt) if self._prompt else ""
        self.ids: list[int] = []
        self.log_p: list[float] = []
        self.stop_id: int | None = None
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def add(self, ids: Sequence[int], log_p: Sequence[float] = ()) -> str:
        """Append ids, and their log probabilities if known; return the new text that can no longer change.

        Raises `UserError` for `NOT_A_NUMBER`.
        """
        if self.finish_reason:
            return ""
        self._append(ids, log_p)

        text = self._new_text(len(self.ids)) if self.finish_reason else self._settled_text()
        begin = self._begin_of_stop(text)
        if begin is not None:
            text = text[:begin]
            self.finish_reason = "stop"
            self._trim_ids(text)
        elif self.finish_reason is None:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            text = text[: max(len(text) - held, len(self.text))]
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _append(self, ids: Sequence[int], log_p: Sequence[float]) -> None:
        """Append ids up to a stop id, a negative id or the limit, and their log probabilities.

        Raises `UserError` for `NOT_A_NUMBER`.
        """
        for n, i in enumerate(ids):
            if i == NOT_A_NUMBER:
                raise UserError(DIVERGED)
            if i < 0:
                self.finish_reason = "exhausted"
                break
            self.log_p += log_p[n : n + 1]  # nothing if unknown
            if i in self._stop_ids:
                self.finish_reason = "stop"
                self.stop_id = i
                break
            self.ids.append(i)
            if len(self.ids) == self._limit:
                self.finish_reason = "length"
                break

    def _begin_of_stop(self, text: str) -> int | None:
        """Return the start of the stop string that ends first in the text; None: the text has no stop string."""
        ends_and_begins = []
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0:
                ends_and_begins.append((begin + len(stop), begin))
        return min(ends_and_begins)[1] if ends_and_begins else None

    def _new_text(self, n: int) -> str:
        """Decode the first n new ids."""
        return self._after_prompt(self._decode(self._prompt + self.ids[:n]))

    def _after_prompt(self, text: str) -> str:
        """Return the part of a decoded text after the text of the prompt."""
        if text.startswith(self._before):
            return text[len(self._before) :]
        # Bytes at the end of the prompt became part of a new character, or the whole text belongs to the prompt.
        common = 0
        for before, now in zip(self._before, text, strict=False):
            if before != now:
                break
            common += 1
        return text[common:]

    def _settled_text(self) -> str:
        """Return the text that further ids cannot change."""
        ids = self._settled_ids(self._prompt + self.ids)
        text = self._decode(ids) if ids else ""
        # Up to three bytes of an incomplete character may remain; some decoders return one U+FFFD per byte.
        end = len(text)
        while end > max(len(text) - 3, 0) and text[end - 1] == UNFINISHED:
            end -= 1
        return self._after_prompt(text[:end])

    def _trim_ids(self, text: str) -> None:
        """Keep the shortest prefix of the ids with a text that begins with `text`."""
        fewest = len(self.ids)
        for n in range(len(self.ids) - 1, -1, -1):
            shorter = self._new_text(n)
            if shorter.startswith(text):
                fewest = n
            elif len(shorter) < len(text):  # no match among shorter prefixes
                break
        del self.ids[fewest:]
        del self.log_p[fewest:]
        self.stop_id = None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the stop string."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
