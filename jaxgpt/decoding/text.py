"""Turn ids into text as they arrive: never half a character, nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from jaxgpt.config import UserError
from jaxgpt.decoding.sampling import DIVERGED, NOT_A_NUMBER

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are no character, or not yet one

FinishReason = Literal["stop", "length", "exhausted"]


class TextStream:
    """The new text of one row. The pieces joined are the text, however the ids arrive.

    The text is what `decode` adds to the prompt: prompt and new ids are decoded together, because a decoder may strip the
    first space of a text, or join the bytes of one character across the border.

    Attributes:
        ids: the new ids so far; in the end those of the text, without what ended it.
        text: what has been returned.
        finish_reason: None while the row continues.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        limit: int,
        stop_ids: Iterable[int] = (),
        stops: Iterable[str] = (),
        *,
        prompt: Sequence[int] = (),
        byte_ids: Collection[int] = (),
    ) -> None:
        """Start with no new ids.

        Args:
            decode: ids to text.
            limit: maximum number of new ids.
            stop_ids: each ends the row and is not part of it.
            stops: strings; each ends the row where it begins.
            prompt: ids before the text, which belong to it.
            byte_ids: ids that `decode` joins with their neighbors to characters, so that the next one can change the text
                of a whole run of them.
        """
        self._decode, self._limit = decode, limit
        self._stop_ids, self._stops, self._byte_ids = frozenset(stop_ids), tuple(stops), byte_ids
        self._prompt = list(prompt)
        self._before = decode(self._prompt) if self._prompt else ""
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def add(self, ids: Iterable[int]) -> str:
        """Append the next ids; returns the text that can no longer change.

        Raises:
            UserError: the model's logits are NaN.
        """
        if self.finish_reason:
            return ""
        for i in ids:
            if i == NOT_A_NUMBER:
                raise UserError(DIVERGED)
            if i < 0:
                self.finish_reason = "exhausted"
                break
            if i in self._stop_ids:
                self.finish_reason = "stop"
                break
            self.ids.append(i)
            if len(self.ids) == self._limit:
                self.finish_reason = "length"
                break
        text = self._new(len(self.ids)) if self.finish_reason else self._settled()
        end = self._stop(text)
        if end is not None:
            self.finish_reason, text = "stop", text[:end]
            self._trim_ids(text)
        elif self.finish_reason is None:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            text = text[: max(len(text) - held, len(self.text))]
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _new(self, n: int) -> str:
        """The text of the first n new ids."""
        return self._after_prompt(self._decode(self._prompt + self.ids[:n]))

    def _after_prompt(self, text: str) -> str:
        if text.startswith(self._before):
            return text[len(self._before) :]
        # Bytes at the prompt's end have become another character, which is new; or all of the text is the prompt's.
        same = next((i for i, (a, b) in enumerate(zip(self._before, text, strict=False)) if a != b), len(text))
        return text[same:]

    def _settled(self) -> str:
        """The text that no further id can change."""
        ids = self._prompt + self.ids
        while ids and ids[-1] in self._byte_ids:
            ids.pop()
        text = self._decode(ids) if ids else ""
        # Of a character of four bytes three may be there, and some decoders show each.
        end = len(text)
        while end > max(len(text) - 3, 0) and text[end - 1] == UNFINISHED:
            end -= 1
        return self._after_prompt(text[:end])

    def _stop(self, text: str) -> int | None:
        """Where the stop string that is complete first begins."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _trim_ids(self, text: str) -> None:
        """Keep the fewest ids whose text begins with this one."""
        fewest = len(self.ids)
        for n in range(len(self.ids) - 1, -1, -1):
            shorter = self._new(n)
            if shorter.startswith(text):
                fewest = n
            elif len(shorter) < len(text):  # an unfinished character takes no fewer places than a finished one
                break
        del self.ids[fewest:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
