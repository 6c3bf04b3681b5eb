"""Records of preference pairs: convert the shapes in data sets to a prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.data.chat.files import RecordKind
from jaxgpt.data.chat.messages import (
    LIST_FIELDS,
    begins_with,
    comparable,
    messages_from_json,
    plain_message,
    read_messages,
)
from jaxgpt.data.chat.record_fields import (
    ALREADY_ANSWERED,
    CONTEXT_FIELDS,
    HISTORY,
    MEDIA_FIELDS,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
)
from jaxgpt.data.chat.records import ChatRecord, Pair, read_record, without_loss
from jaxgpt.data.files.lenient_json import parse_field
from jaxgpt.data.files.skipped import UnusableRecord
from jaxgpt.errors import UserError, short_repr

CHOSEN = "chosen"
REJECTED = "rejected"
# Map from the field of the prompt to the field of the answer in a conversation of the same shape.
PROMPTS = {"prompt": "completion", "instruction": "output", "question": "answer", "query": "response"}
# Fields that belong to the prompt.
PROMPT_CONTEXT = (*CONTEXT_FIELDS, HISTORY, *SYSTEM_FIELDS, *TOOL_FIELDS, *MEDIA_FIELDS)
FIELDS = frozenset({CHOSEN, REJECTED, *PROMPTS, *LIST_FIELDS, *PROMPT_CONTEXT})
EXAMPLE = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}'


class EmptyAnswer(UnusableRecord):
    """The error for a pair with an answer without text."""

    reason = "with an empty answer"


class EqualAnswers(UnusableRecord):
    """The error for a pair with equal answers."""

    reason = "with equal answers"


class PreferenceRecord(NamedTuple):
    """A prompt with each of its two answers, in the form of conversations."""

    chosen: ChatRecord | Pair
    rejected: ChatRecord | Pair


# A prompt or an answer: a text, or a list of messages as in the record.
TextOrMessages = str | list[Any]


class _Parts(NamedTuple):
    """A prompt and two answers that do not repeat it."""

    prompt: TextOrMessages | None  # None: not found
    chosen: TextOrMessages
    rejected: TextOrMessages


def is_preference(record: Any) -> bool:
    """Return whether a record has two answers, of any shape."""
    return isinstance(record, dict) and {CHOSEN, REJECTED} <= record.keys()


def read_preference(record: Any) -> PreferenceRecord:
    """Convert a record to a prompt with two answers.

    The answers are two texts or two lists of messages. If the record has no prompt, the common beginning of the answers is the
    prompt, as in TRL: equal first messages, or equal first characters without a space at the end. Answers that are complete
    conversations may repeat the prompt.

    Raises:
        UserError: if the record has an unknown shape or an empty answer, or both answers are equal.
    """
    if not isinstance(record, dict):
        raise UserError(f"a preference pair must be an object, not {short_repr(record)}: write {EXAMPLE}")
    fields = {name: value for name, value in record.items() if value is not None}
    missing = [name for name in (CHOSEN, REJECTED) if name not in fields]
    if missing:
        raise UserError(
            f"no {' and no '.join(missing)} answer: the fields are {short_repr([*record])}; write {EXAMPLE}"
        )

    # The prompt and each answer form a conversation.
    field, prompt = _prompt(fields)
    parts = _parts(fields, prompt)
    answered = PROMPTS[field]
    others = {key: fields[key] for key in PROMPT_CONTEXT if key in fields and key != field}  # `instruction` may be both
    chosen = read_record({field: parts.prompt, answered: parts.chosen, **others})
    rejected = read_record({field: parts.prompt, answered: parts.rejected, **others})
    return PreferenceRecord(
        chosen=_without_earlier_targets(chosen, parts.chosen, CHOSEN),
        rejected=_without_earlier_targets(rejected, parts.rejected, REJECTED),
    )


def _parts(fields: Mapping[str, Any], prompt: Any) -> _Parts:
    """Return the prompt of a record and its answers after the prompt; raise `UserError` if they cannot be compared."""
    chosen, rejected = _answers(fields)
    _check_not_empty(chosen, rejected)
    _check_different(chosen, rejected)

    parts = _split_prompt(prompt, chosen, rejected)
    # Common first messages are a complete prompt. A common text may lack what other fields of the prompt contain.
    has_context = any(fields.get(name) for name in PROMPT_CONTEXT)
    may_lack_context = prompt is None and isinstance(chosen, str) and has_context
    if parts.prompt is None or may_lack_context:
        raise _no_prompt(fields)
    _check_speakers(parts)
    _check_not_empty(parts.chosen, parts.rejected)
    return parts


def _answers(fields: Mapping[str, Any]) -> tuple[TextOrMessages, TextOrMessages]:
    """Return the chosen and the rejected answer: two texts, or two lists of messages."""
    chosen = _text_or_messages(fields[CHOSEN], CHOSEN)
    rejected = _text_or_messages(fields[REJECTED], REJECTED)

    # Lists of messages may be stored as JSON text. If only one answer looks like JSON, it is a text.
    parsed_chosen = messages_from_json(chosen)
    parsed_rejected = messages_from_json(rejected)
    if isinstance(parsed_chosen, list) and isinstance(parsed_rejected, list):
        return parsed_chosen, parsed_rejected
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("one answer is a text, and the other a list of messages: write both in the same form")
    return chosen, rejected


def _text_or_messages(answer: Any, name: str) -> TextOrMessages:
    """Return the answer of a field as a text or a list of messages; a single message becomes a list."""
    if isinstance(answer, dict):
        return [answer]
    if not isinstance(answer, str | list):
        raise UserError(f"the {name} answer must be a text or a list of messages, not {short_repr(answer)}")
    return answer


def _prompt(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of the prompt's field and the prompt; None: the record has no field for it."""
    for name in PROMPTS:
        if name in fields:
            return name, messages_from_json(fields[name])
    for name in LIST_FIELDS:
        if name in fields:
            return "prompt", parse_field(fields[name], f"the field {name!r}")
    return "prompt", None


def _check_different(chosen: TextOrMessages, rejected: TextOrMessages) -> None:
    """Raise `EqualAnswers` for complete answers that are equal; their common beginning would leave two empty answers."""
    if _comparable(chosen) == _comparable(rejected):
        raise EqualAnswers("the chosen and the rejected answer are equal: change one, or remove the record")


def _comparable(answer: TextOrMessages) -> Sequence[Any]:
    """Return the characters of a text, or messages in the form of templates."""
    return answer if isinstance(answer, str) else [comparable(message) for message in answer]


def _split_prompt(prompt: Any, chosen: TextOrMessages, rejected: TextOrMessages) -> _Parts:
    """Move the common beginning of two different answers to the prompt, or remove messages that repeat a prompt.

    Two texts with a prompt stay unchanged.
    """
    if isinstance(prompt, list) and begins_with(prompt[-1:], "assistant"):
        raise UserError(ALREADY_ANSWERED)

    if isinstance(chosen, list) and isinstance(rejected, list):
        return _split_messages(prompt, chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        return _split_texts(chosen, rejected)
    return _Parts(prompt, chosen, rejected)


def _split_messages(prompt: Any, chosen: list[Any], rejected: list[Any]) -> _Parts:
    """Split two lists after their common first messages.

    If the prompt is a list of messages, only messages that repeat its end are removed. Otherwise, the common messages are the
    prompt, as in TRL, and a text prompt is used only if they do not begin with a request.
    """
    messages = _comparable(chosen)
    shared = _shared(messages, _comparable(rejected))
    if isinstance(prompt, list):
        repeated = _repeated(_comparable(prompt), messages[:shared])
        return _Parts(prompt, chosen[repeated:], rejected[repeated:])
    if not shared:
        return _Parts(prompt, chosen, rejected)
    return _Parts(_with_request(chosen[:shared], prompt), chosen[shared:], rejected[shared:])


def _split_texts(chosen: str, rejected: str) -> _Parts:
    """Split two texts at their first difference, or before a space that precedes it.

    If one text begins with the other, the shorter answer is the last character of the shorter text, as in TRL.
    """
    n = _shared(chosen, rejected)
    if n == min(len(chosen), len(rejected)):
        n -= 1
    if n > 0 and chosen[n - 1] == " ":
        n -= 1
    return _Parts(chosen[:n] or None, chosen[n:], rejected[n:])


def _repeated(prompt: Sequence[Any], messages: Sequence[Any]) -> int:
    """Return the number of first messages of an answer that repeat the end of the prompt, such as its last request."""
    for n in range(min(len(prompt), len(messages)), 0, -1):
        if prompt[-n:] == messages[:n]:
            return n
    return 0


def _with_request(messages: Sequence[Any], prompt: Any) -> list[Any]:
    """Return the first messages of a conversation; if they do not begin with a request, insert the text `prompt`."""
    begin = 1 if begins_with(messages, "system") else 0
    if not isinstance(prompt, str) or begins_with(messages[begin:], "user"):
        return [*messages]
    return [*messages[:begin], plain_message("user", prompt), *messages[begin:]]


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of equal first items."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def _no_prompt(fields: Mapping[str, Any]) -> UserError:
    """Return the error for a record without a prompt; fields that belong to a prompt show that a request is missing."""
    for name in PROMPT_CONTEXT:
        if fields.get(name):
            return UserError(
                f"the record has no prompt, so the field {name!r} has no defined place: rename the field with the request to "
                f"'prompt'"
            )
    return UserError(f"the answers have no common beginning, and the record has no prompt: write {EXAMPLE}")


def _check_speakers(parts: _Parts) -> None:
    """Raise `UserError` if an answer begins with a message of the user or a system message."""
    for name, answer in ((CHOSEN, parts.chosen), (REJECTED, parts.rejected)):
        if isinstance(answer, list) and (begins_with(answer, "user") or begins_with(answer, "system")):
            raise UserError(
                f"the {name} answer begins with a message that the assistant did not write: {short_repr(answer[0])}; move it "
                f"to the prompt, or add it to both answers"
            )


def _check_not_empty(chosen: TextOrMessages, rejected: TextOrMessages) -> None:
    """Raise `EmptyAnswer` if an answer has no text and no calls."""
    for name, answer in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not answer or _is_blank(answer):
            raise EmptyAnswer(f"the {name} answer is empty: write an answer, or remove the record")


def _is_blank(answer: TextOrMessages) -> bool:
    """Return whether an answer is a single message without text or calls."""
    match answer:
        case [{**message}]:
            return not any(message.get(name) for name in ("content", "value", "tool_calls", "function_call"))
    return False


def _without_earlier_targets(record: ChatRecord | Pair, answer: TextOrMessages, name: str) -> ChatRecord | Pair:
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
            f"assistant"
        )
    return record._replace(messages=[*prompt, *answered])


PREFERENCE_PAIRS = RecordKind("preference pairs", read_preference, FIELDS, EXAMPLE)
