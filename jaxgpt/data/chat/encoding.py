"""Encode conversations: the ids that chat sends, and the sequences and targets of training.

Both come from `ChatFormat`. A training sequence with one answer consists of the ids that chat sends, the ids of the answer,
and the end of the turn. The targets are the answer and the end, unless the answer has the weight 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data.chat.frame import Frame, read_frame
from jaxgpt.data.chat.marked import MarkedAnswers
from jaxgpt.data.chat.names import NameMarker, Protected
from jaxgpt.data.chat.parts import Part, RenderedAnswers
from jaxgpt.data.chat.renderings import Renderings
from jaxgpt.data.chat.template import ChatTemplate, Message
from jaxgpt.data.chat.turn_end import TurnEnd, find_end
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.data.tokenizers.part_encoder import PartEncoder
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError, short_repr
from jaxgpt.template_variables import check_variables


class Conversation(NamedTuple):
    """An encoded conversation, or one of its sequences (`ChatFormat.encode`)."""

    ids: np.ndarray  # int32
    is_target: np.ndarray  # bool; True for the ids of answers with a weight other than 0, including the ends of turns


class ChatFormat:
    """The format of conversations: a chat template and the tokenizer of its text.

    Args:
        template: chat template, with its variables.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self.tokenizer = tokenizer

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that chat sends for an answer to the last message.

        Raises:
            UserError: if the messages are malformed, the template or the tokenizer rejects them, or the tokenizer lacks a token
                of `data.answer_tokens`.
        """
        protected = self._protected(self.template.readable(messages), tools, is_prompt=True)
        *_, last = self._sequences(protected.renderings)
        ids: list[int] = self._encode(last, protected.mark).ids.tolist()
        return ids

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Conversation]:
        """Encode a complete conversation for training.

        All answers are in one sequence, unless a template without `{% generation %}` changes earlier text when messages are
        added. In that case, an answer after a change begins a new sequence.

        Raises:
            UserError: if `prompt_ids` rejects the messages, no message has the role assistant, the text of an answer cannot
                be located, or the first message has the role assistant and the template has no `{% generation %}`.
        """
        messages = self.template.readable(messages)
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise UserError(
                f"no message has the role assistant, but only assistant messages are trained on: the roles are "
                f"{short_repr(roles)}; rename the role of the answers to assistant"
            )
        protected = self._protected(messages, tools, is_prompt=False)
        return [self._encode(parts, protected.mark) for parts in self._sequences(protected.renderings)]

    def content(self, answer: str) -> str:
        """Return the content of a generated answer, without the white space that the template adds around an answer."""
        text = answer.removeprefix(self.frame.lead)
        if self.end.stop_id is None:
            return text
        end = self.end.text  # such as " </s>"; generated text does not include the name of the token
        space_before = end[: len(end) - len(end.lstrip())]
        return text.removesuffix(space_before)

    @cached_property
    def frame(self) -> Frame:
        """The text that the template adds around messages."""
        return read_frame(self.template)

    @property
    def added_target(self) -> str:
        """The text that the template adds to answers as a target; "": no text, or the template marks the targets."""
        return "" if "endgeneration" in self.template.source else self.frame.kept_opening

    @cached_property
    def end(self) -> TurnEnd:
        """The end of the assistant's turn."""
        return find_end(self.frame.tail, self.tokenizer, self._control)

    @property
    def warning(self) -> str:
        """A warning that the end of the turn is unknown; "": it is known."""
        if self.end.stop_id is not None or self.end.stop:
            return ""
        if self.frame.tail is None:
            problem = "the end of a turn cannot be derived from the chat template"
        else:
            problem = "the chat template renders no end of a turn, and the tokenizer has no end-of-text token"
        return (
            f"{problem}: answers may not stop; add the end to the chat template, or pass stop strings to chat (--stop)"
        )

    @cached_property
    def _control(self) -> ControlTokens:
        """Special tokens, and further tokens that the template may write.

        Further tokens are added tokens in the text around a user's message or after an answer, tokens in variables such as
        `eos_token`, and a word of a tokenizer of words that is the complete text after an answer.
        """
        added = set[str]()
        if isinstance(self.tokenizer, SubwordTokenizer):
            added = {token.content for token in self.tokenizer.library.get_added_tokens_decoder().values()}
        for name in self.template.answer_tokens:
            if name not in added:
                raise UserError(f"data.answer_tokens: the tokenizer has no added token {short_repr(name)}; remove it")

        tail = self.frame.tail or ""
        around = self.frame.around_user + tail
        further = {name for name in added if name in around}
        further.add(tail.strip())
        for name, value in self.template.variables.items():
            if name.endswith("_token") and isinstance(value, str):
                further.add(value)
        return ControlTokens(self.tokenizer, further)

    def _protected(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, is_prompt: bool) -> Protected:
        """Return the renderings of a conversation with marks in the names of control tokens."""
        return self._names.protected(Renderings(self.template, messages, tools, self.frame.header, is_prompt))

    def _sequences(self, renderings: Renderings) -> list[list[Part]]:
        """Split a conversation with protected names into sequences of parts."""
        whole = renderings.whole()
        if whole.spans:
            return [MarkedAnswers(self.frame, self.end).parts(renderings, whole)]
        return RenderedAnswers(self.frame, self.end).sequences(renderings)

    @cached_property
    def _names(self) -> NameMarker:
        return NameMarker(self.template, self._control)

    @cached_property
    def _part_encoder(self) -> PartEncoder:
        return PartEncoder(self._control)

    def _encode(self, parts: Sequence[Part], mark: str) -> Conversation:
        """Encode the parts of a sequence, with the mask of its targets; `mark` as in `Protected`."""
        ids = list[int]()
        is_target = list[bool]()
        encoded = self._part_encoder.encode([part.text for part in parts], mark)
        for part, part_ids in zip(parts, encoded, strict=True):
            end_ids = self.end.ids if part.adds_end else ()
            ids += [*part_ids, *end_ids]
            is_target += [part.is_target] * (len(part_ids) + len(end_ids))
        return Conversation(np.array(ids, np.int32), np.array(is_target, bool))


def chat_format(
    tokenizer: Tokenizer,
    data: DataConfig,
    variables: Mapping[str, Any] | None = None,
    date: str = "",
    with_tools: bool = False,
) -> ChatFormat | None:
    """Return the format of a model's conversations; None: the model has no chat template for them.

    Args:
        tokenizer: tokenizer of the model, with its special tokens.
        data: `data` settings of the run.
        variables: variables of the template, in addition to `data.chat_template_kwargs`.
        date: date for templates that include it; empty: today.
        with_tools: whether the conversations have tools; some models have a separate template for them, named tool_use.

    Raises:
        UserError: if a variable is not a JSON value, or has the name of a variable that jaxgpt sets.
    """
    special = tokenizer.special
    source = special.tool_template if with_tools else special.chat_template
    if source is None:
        return None
    given = data.template_variables | check_variables(variables or {})
    values = json.dumps(special.variables | given)
    return _known_format(tokenizer, source, values, date, data.answer_tokens)  # type: ignore[arg-type]  # a protocol declares no __hash__


def stop_ids(tokenizer: Tokenizer, data: DataConfig) -> tuple[int, ...]:
    """Return the ids that end a generated text: the ends of the assistant's turn, if any, then the end-of-text ids."""
    ids = list[int]()
    for with_tools in (False, True):
        form = chat_format(tokenizer, data, with_tools=with_tools)
        if form is not None and form.end.stop_id is not None:
            ids.append(form.end.stop_id)
    return tuple(dict.fromkeys((*ids, *tokenizer.end_ids)))


@lru_cache(maxsize=8)
def _known_format(
    tokenizer: Tokenizer, source: str, values: str, date: str, answer_tokens: tuple[str, ...]
) -> ChatFormat:
    return ChatFormat(ChatTemplate(source, json.loads(values), date, answer_tokens), tokenizer)
