"""Records of preference pairs: convert the shapes in data sets to a prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.data.chat.files import RecordKind
from jaxgpt.data.chat.messages import LIST_FIELDS, begins_with, comparable, messages_from_json, read_messages
from jaxgpt.data.chat.record_fields import (
    ALREADY_ANSWERED,
    CONTEXT_FIELDS,
    HISTORY,
    MEDIA_FIELDS,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
)
from jaxgpt.data.chat.records import COMPLETION, ChatRecord, ExchangeFields, Pair, read_exchange, without_loss
from jaxgpt.data.files.lenient_json import parse_field
from jaxgpt.data.files.skipped import UnusableRecord
from jaxgpt.data.preference_prompts import Content, are_equal, separate
from jaxgpt.errors import UserError, short_repr

CHOSEN = "chosen"
REJECTED = "rejected"
# Fields of the prompt, in order of priority, with the field of the answer in a conversation of the same shape.
EXCHANGES = (
    COMPLETION,
    ExchangeFields("instruction", "output"),
    ExchangeFields("question", "answer"),
    ExchangeFields("query", "response"),
)
# Other fields that belong to the prompt; `instruction` may be either.
PROMPT_CONTEXT = (*CONTEXT_FIELDS, HISTORY, *SYSTEM_FIELDS, *TOOL_FIELDS, *MEDIA_FIELDS)
REQUESTS = tuple(exchange.request for exchange in EXCHANGES)
FIELDS = frozenset({CHOSEN, REJECTED, *REQUESTS, *LIST_FIELDS, *PROMPT_CONTEXT})
EXAMPLE = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}'


class EmptyAnswer(UnusableRecord):
    """The error for a pair with an answer that has neither text nor calls; white space is text."""

    reason = "with an empty answer"


class EqualAnswers(UnusableRecord):
    """The error for a pair with equal answers."""

    reason = "with equal answers"


class PreferenceRecord(NamedTuple):
    """A prompt with each of its two answers, in the form of conversations."""

    chosen: ChatRecord | Pair
    rejected: ChatRecord | Pair


class _GivenPrompt(NamedTuple):
    """The prompt in a field of a record."""

    exchange: ExchangeFields  # shape of a conversation with this prompt
    content: Content | None  # None: the record has no field for it


def is_preference(record: Any) -> bool:
    """Return whether a record has two answers, of any shape."""
    return isinstance(record, dict) and {CHOSEN, REJECTED} <= record.keys()


def read_preference(record: Any) -> PreferenceRecord:
    """Convert a record to a prompt with two answers.

    The answers are two texts or two lists of messages. Without a prompt in the record, the common beginning of the answers is
    the prompt. Answers that are complete conversations may repeat the prompt (`separate`).

    Raises:
        UserError: if the record has an unknown shape, an invalid field or an empty answer, or both answers are equal.
    """
    if not isinstance(record, dict):
        raise UserError(f"a preference pair must be an object, not {short_repr(record)}: write {EXAMPLE}")
    fields = {name: value for name, value in record.items() if value is not None}
    missing = [name for name in (CHOSEN, REJECTED) if name not in fields]
    if missing:
        raise UserError(
            f"no {' and no '.join(missing)} answer: the fields are {short_repr([*record])}; write {EXAMPLE}"
        )

    given = _given_prompt(fields)
    chosen, rejected = _answers(fields)
    if are_equal(chosen, rejected):  # their common beginning would leave two empty answers
        raise EqualAnswers("the chosen and the rejected answer are equal: change one, or remove the record")
    parts = separate(given.content, chosen, rejected)
    context = {name: fields[name] for name in PROMPT_CONTEXT if name in fields and name != given.exchange.request}
    _check_prompt(given.content, parts.prompt, context)
    _check_answer(CHOSEN, parts.chosen)
    _check_answer(REJECTED, parts.rejected)

    # The prompt and each answer form a conversation.
    with_chosen = read_exchange(given.exchange, parts.prompt, parts.chosen, context)
    with_rejected = read_exchange(given.exchange, parts.prompt, parts.rejected, context)
    return PreferenceRecord(
        chosen=_without_earlier_targets(with_chosen, parts.chosen, CHOSEN),
        rejected=_without_earlier_targets(with_rejected, parts.rejected, REJECTED),
    )


def _given_prompt(fields: Mapping[str, Any]) -> _GivenPrompt:
    """Read the prompt in the first of the fields `REQUESTS` and `LIST_FIELDS` that a record has.

    Raises:
        UserError: if the prompt is neither a text nor a list of messages, or ends with an answer.
    """
    for exchange in EXCHANGES:
        if exchange.request in fields:
            content = messages_from_json(fields[exchange.request])
            return _GivenPrompt(exchange, _checked_prompt(content))
    for name in LIST_FIELDS:
        if name in fields:
            content = parse_field(fields[name], f"the field {name!r}")
            return _GivenPrompt(COMPLETION, _checked_prompt(content))
    return _GivenPrompt(COMPLETION, None)


def _checked_prompt(prompt: Any) -> Content:
    """Return a prompt; raise `UserError` if it is neither a text nor a list of messages, or ends with an answer."""
    if not isinstance(prompt, str | list):
        raise UserError(f"the prompt must be a text or a list of messages, not {short_repr(prompt)}: write {EXAMPLE}")
    if isinstance(prompt, list) and begins_with(prompt[-1:], "assistant"):
        raise UserError(ALREADY_ANSWERED)
    return prompt


def _answers(fields: Mapping[str, Any]) -> tuple[Content, Content]:
    """Return the chosen and the rejected answer: two texts, or two lists of messages; neither is empty."""
    chosen = _answer(fields[CHOSEN], CHOSEN)
    rejected = _answer(fields[REJECTED], REJECTED)

    # Lists of messages may be stored as JSON text. If only one answer looks like JSON, it is a text.
    parsed_chosen = messages_from_json(chosen)
    parsed_rejected = messages_from_json(rejected)
    if isinstance(parsed_chosen, list) and isinstance(parsed_rejected, list):
        chosen = parsed_chosen
        rejected = parsed_rejected
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("one answer is a text, and the other a list of messages: write both in the same form")
    _check_not_empty(CHOSEN, chosen)
    _check_not_empty(REJECTED, rejected)
    return chosen, rejected


def _answer(answer: Any, name: str) -> Content:
    """Return the answer of a field as a text or a list of messages; a single message becomes a list."""
    if isinstance(answer, dict):
        return [answer]
    if not isinstance(answer, str | list):
        raise UserError(f"the {name} answer must be a text or a list of messages, not {short_repr(answer)}")
    return answer


def _check_prompt(given: Content | None, prompt: Content | None, context: Mapping[str, Any]) -> None:
    """Check that a pair has a prompt that includes the context.

    Args:
        given: prompt in a field of the record; None: no such field.
        prompt: prompt after `separate`.
        context: the other fields of the record that belong to the prompt.

    Raises:
        UserError: if the answers have no common beginning, or the fields show that a request is missing before it.
    """
    # Common first messages are a complete prompt. A common text may lack what the context contains.
    is_common_text = given is None and isinstance(prompt, str)
    context_names = [name for name, value in context.items() if value]
    if context_names and (prompt is None or is_common_text):
        raise UserError(
            f"the record has no prompt, so the field {context_names[0]!r} has no defined place: rename the field with the "
            "request to 'prompt'"
        )
    if prompt is None:
        raise UserError(f"the answers have no common beginning, and the record has no prompt: write {EXAMPLE}")


def _check_answer(name: str, answer: Content) -> None:
    """Raise `UserError` if nothing remains of an answer after the prompt, or it begins with a user or system message."""
    if isinstance(answer, list) and (begins_with(answer, "user") or begins_with(answer, "system")):
        raise UserError(
            f"the {name} answer begins with a message that the assistant did not write: {short_repr(answer[0])}; move it to "
            "the prompt, or add it to both answers"
        )
    _check_not_empty(name, answer)


def _check_not_empty(name: str, answer: Content) -> None:
    """Raise `EmptyAnswer` if an answer has no text and no calls."""
    is_empty = not answer if isinstance(answer, str) else all(map(_is_blank, answer))
    if is_empty:
        raise EmptyAnswer(f"the {name} answer is empty: write an answer, or remove the record")


def _is_blank(message: Any) -> bool:
    """Return whether a message has no text and no calls."""
    fields = comparable(message)  # text parts are joined; an invalid message keeps its own fields
    if not isinstance(fields, dict):
        return False
    return not any(fields.get(name) for name in ("content", "value", "tool_calls", "function_call"))


def _without_earlier_targets(record: ChatRecord | Pair, answer: Content, name: str) -> ChatRecord | Pair:
    """Return a record in which only messages of the answer are targets, not earlier answers, such as answers in `history`.

    Raises:
        UserError: if the answer, the field `name`, has no message of the assistant.
    """
    if isinstance(record, Pair):
        return record
    # The record ends with the messages of the answer; several calls in the answer may be one message of the record.
    n = 1 if isinstance(answer, str) else len(read_messages("answer", answer))
    prompt = [without_loss(message) for message in record.messages[:-n]]
    answered = record.messages[-n:]
    roles = [message["role"] for message in answered]
    if "assistant" not in roles:
        raise UserError(
            f"the {name} answer has no message of the assistant: the roles are {short_repr(roles)}; rename the role to "
            "assistant"
        )
    return record._replace(messages=[*prompt, *answered])


PREFERENCE_PAIRS = RecordKind("preference pairs", read_preference, FIELDS, EXAMPLE)
