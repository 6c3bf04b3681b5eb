"""Records of conversations: convert the shapes in data sets to a single form, messages and tools.

The form matches OpenAI's chat API and transformers' `apply_chat_template`. It does not depend on a chat template.
docs/finetune.md lists the accepted shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jaxgpt.data.chat.files import RecordKind
from jaxgpt.data.chat.labels import KTO_TAG, LABEL, LABEL_FIELDS, check_accepted, is_label_false
from jaxgpt.data.chat.messages import (
    EXAMPLE,
    LIST_FIELDS,
    begins_with,
    messages_from_json,
    plain_message,
    read_messages,
)
from jaxgpt.data.chat.record_fields import (
    CONTEXT_FIELDS,
    HISTORY,
    MEDIA_FIELDS,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
    check_media,
    history_messages,
    read_tools,
    system_text,
    with_input,
)
from jaxgpt.errors import UserError, short_repr


class ExchangeFields(NamedTuple):
    """The names of the fields that hold a request and its answer."""

    request: str
    answer: str


# A completion continues its prompt: a model without a chat template can read both as one text.
COMPLETION = ExchangeFields("prompt", "completion")
EXCHANGES = (
    COMPLETION,
    ExchangeFields("prompt", "response"),
    ExchangeFields("instruction", "output"),
    ExchangeFields("instruction", "response"),
    ExchangeFields("question", "answer"),
    ExchangeFields("question", "response"),
    ExchangeFields("query", "response"),
)
# All fields that are read.
FIELDS = frozenset(
    [
        *LIST_FIELDS,
        *chain(*EXCHANGES),
        *CONTEXT_FIELDS,
        *SYSTEM_FIELDS,
        *TOOL_FIELDS,
        HISTORY,
        *LABEL_FIELDS,
        *MEDIA_FIELDS,
    ]
)
SHAPES = (
    '"messages" (with role and content), "conversations" (with from and value), "prompt" and "completion", "instruction" '
    'and "output", or "question" and "answer"'
)


class ChatRecord(NamedTuple):
    """A conversation in the form of transformers' `apply_chat_template`.

    Attributes:
        messages: dicts with `role`, `content` (a string; missing if there are only calls), and the other non-null fields. The
            `arguments` of `tool_calls` are an object or its JSON. Assistant messages that are not targets have the `weight` 0.
        tools: descriptions of functions, as in the record; None: no tools.
        may_be_rejected: whether the record has messages and the `label` false or 0, which marks a rejected answer in data for
            KTO, but may also be the class of the conversation.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    may_be_rejected: bool = False


class Pair(NamedTuple):
    """A prompt and its completion, which are concatenated for a model without a chat template."""

    prompt: str
    completion: str

    @property
    def chat(self) -> ChatRecord:
        """The prompt and the completion as messages."""
        return ChatRecord([plain_message("user", self.prompt), plain_message("assistant", self.completion)])


def read_record(record: Any) -> ChatRecord | Pair:
    """Convert a record of any accepted shape to messages and tools, or to a prompt and its completion.

    A prompt and its completion stay a `Pair`, which needs no chat template, if both are texts, and the record has no tools,
    system message or history.

    Raises:
        RejectedAnswer: if the record is labelled as a rejected answer.
        UserError: if the record has an unknown or ambiguous shape, or a field that is read has a wrong type.
    """
    if not isinstance(record, dict):
        raise UserError(f"a conversation must be an object, not {short_repr(record)}: write {EXAMPLE}")
    fields = {name: value for name, value in record.items() if value is not None}
    tools = read_tools(fields)
    shape = _find_shape(fields, list(record))
    check_accepted(KTO_TAG, fields)
    if isinstance(shape, ExchangeFields):
        check_accepted(LABEL, fields)
        request = messages_from_json(fields[shape.request])
        answer = fields[shape.answer]
        if not isinstance(request, str):  # the answer to a text is a text, even if it is JSON
            answer = messages_from_json(answer)
        return read_exchange(shape, request, answer, fields)

    messages = read_messages(shape, fields[shape])
    check_media(fields, messages)
    return ChatRecord(_with_system(messages, fields), tools, may_be_rejected=is_label_false(fields))


def read_exchange(exchange: ExchangeFields, request: Any, answer: Any, fields: Mapping[str, Any]) -> ChatRecord | Pair:
    """Return a request and its answer as messages after the earlier messages, or as a `Pair` (`read_record`).

    Args:
        exchange: names of the fields of the request and the answer.
        request: text or list of messages.
        answer: text or list of messages.
        fields: the fields of the record that are not null; the context, history, system message, tools and media are read.

    Raises:
        UserError: if the request, the answer or a field that is read has a wrong type, or a field has no defined place.
    """
    tools = read_tools(fields)
    if not isinstance(request, str):
        asked = [without_loss(message) for message in read_messages(exchange.request, request)]
    elif exchange == COMPLETION:  # a prompt to complete has no place for an input or context
        asked = [plain_message("user", request)]
    else:
        asked = [plain_message("user", with_input(exchange.request, request, fields))]
    if isinstance(answer, str):
        answered = [plain_message("assistant", answer)]
    else:
        answered = read_messages(exchange.answer, answer)

    messages = with_history([*asked, *answered], fields)
    check_media(fields, messages)
    conversation = ChatRecord(_with_system(messages, fields), tools)

    # Without tools, a system message and a history, two texts need no chat template.
    if exchange == COMPLETION and isinstance(request, str) and isinstance(answer, str):
        pair = Pair(request, answer)
        if pair.chat == conversation:
            return pair
    return conversation


def with_history(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Insert the messages of a record's `history` before the first message, or after a system message at the beginning."""
    begin = 1 if begins_with(messages, "system") else 0
    return [*messages[:begin], *history_messages(fields), *messages[begin:]]


def _with_system(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return messages that begin with the system message of a record, unless they already begin with one."""
    system = "" if messages[0]["role"] == "system" else system_text(fields)
    return [plain_message("system", system), *messages] if system else messages


def without_loss(message: dict[str, Any]) -> dict[str, Any]:
    """Exclude a message of a prompt from the targets, even if the assistant wrote it."""
    return message | {"weight": 0} if message["role"] == "assistant" else message


def _find_shape(fields: Mapping[str, Any], names: Sequence[str]) -> str | ExchangeFields:
    """Return the field with a list of messages, or the fields of a request and its answer.

    Args:
        fields: the fields of a record that are not null.
        names: names of all fields, for errors.

    Raises:
        UserError: if the fields have no known shape, or several.
    """
    if "messages" in fields:
        return "messages"  # other fields are often a different form of these messages
    lists = [name for name in LIST_FIELDS if name in fields]
    exchanges = [exchange for exchange in EXCHANGES if fields.keys() >= set(exchange)]
    shapes: list[str | ExchangeFields] = [*lists, *exchanges]
    if not shapes and fields.keys() >= {"chosen", "rejected"}:
        raise UserError(
            "a preference pair (chosen, rejected) is not a conversation: train on pairs with --post.objective dpo, or rename "
            "the field of the answer to completion"
        )
    if len(shapes) != 1:
        problem = "an ambiguous shape" if shapes else "no known shape"
        raise UserError(
            f"{problem}: the fields are {short_repr(names)}; use one of {SHAPES}; to train on documents, use "
            f"jaxgpt data prepare"
        )
    return shapes[0]


CONVERSATIONS = RecordKind("conversations", read_record, FIELDS, EXAMPLE)
