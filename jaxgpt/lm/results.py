"""Results of generation: complete texts, and pieces of texts that are being generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxgpt.lm.text import FinishReason, TextStream


class Generation(NamedTuple):
    """The text generated after one prompt.

    Attributes:
        text: the new text; for a string prompt, `prompt + text` is the complete text.
        ids: the new ids, without the stop id; at a stop string, only the ids that `text` needs.
        finish_reason: `stop` at the end of the text or turn, a stop id or a stop string; `length` at the maximum number of
            tokens; `exhausted` if no_repeat_ngram_size or custom filters forbid every token.
        score: `log p / length ** length_penalty` of a beam over its new tokens, including the stop id; None without
            beams.
        log_p: logarithm of the model's probability of each of `ids`, and then of `stop_id`, in nats: before all filters and the
            temperature, as from `score`; () with beams.
        stop_id: the end-of-text or stop id that ended the text; None if it ended otherwise, and with beams.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    score: float | None = None
    log_p: Sequence[float] = ()
    stop_id: int | None = None


class Piece(NamedTuple):
    """A part of a text that is being generated.

    Attributes:
        row: index of the text in the list that `generate` returns.
        text: the next part of the text; only the last piece may be empty, or end in an incomplete character.
        done: the complete `Generation`, set in the last piece of the text; None in earlier pieces.
    """

    row: int
    text: str
    done: Generation | None


def generation_of(text: TextStream) -> Generation:
    """Return the result of a text that has ended."""
    assert text.finish_reason is not None
    return Generation(text.text, text.ids, text.finish_reason, log_p=text.log_p, stop_id=text.stop_id)
