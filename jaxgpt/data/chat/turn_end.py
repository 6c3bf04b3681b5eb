"""The end of the assistant's turn: derive it from the text that a chat template renders after an answer."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError


class TurnEnd(NamedTuple):
    """The end of the assistant's turn.

    Attributes:
        text: text that the template renders after an answer, up to and including the first control token (if any), without
            trailing white space; may be empty.
        ids: ids to append to an answer, because the template renders nothing after it.
        added: name of the control token in `ids`, which the template may render between messages; "": no such name.
        stop_id: id that ends generation, or None.
        stop: text that ends generation if `stop_id` is None; may be empty.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    added: str = ""
    stop_id: int | None = None
    stop: str = ""


def find_end(tail: str | None, tokenizer: Tokenizer, control: ControlTokens) -> TurnEnd:
    """Find the end of a turn in the text after an answer: the first control token or, without control tokens, all text.

    If a template renders no text after an answer, the end-of-text token ends the turn.

    Args:
        tail: text that the template renders after an answer; None: unknown.
        tokenizer: tokenizer of the model.
        control: control tokens of the tokenizer.
    """
    if tail is None:
        return TurnEnd()
    if not tail.strip():
        eos_id = tokenizer.eos_id
        if eos_id is None:
            return TurnEnd()
        return TurnEnd(ids=(eos_id,), added=control.names.get(eos_id, ""), stop_id=eos_id)

    text = tail.rstrip()
    if isinstance(tokenizer, SubwordTokenizer):
        found = control.find(tail)
        if not found:
            return TurnEnd(text, stop=text)
        first = found[0]
        return TurnEnd(tail[: first.end].rstrip(), stop_id=first.id)
    try:
        ids = tokenizer.encode(text).tolist()
    except UserError:  # for example, for a character outside the vocabulary, which no model can generate
        ids = []
    return TurnEnd(text, stop_id=ids[0]) if len(ids) == 1 else TurnEnd(text, stop=text)
