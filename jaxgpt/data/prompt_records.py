"""Records of prompts: a prompt, and any other fields for the reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxgpt.data.chat.files import RecordKind
from jaxgpt.data.chat.messages import LIST_FIELDS, messages_from_json, plain_message
from jaxgpt.data.chat.record_fields import (
    ALREADY_ANSWERED,
    CONTEXT_FIELDS,
    INPUT_FIELDS,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
    check_media,
    history_messages,
    with_input,
)
from jaxgpt.data.chat.records import ChatRecord, Pair, read_record, with_history
from jaxgpt.errors import UserError, short_repr

FIELDS = ("prompt", "question", "instruction", "query", *LIST_FIELDS)  # fields with the prompt
EXAMPLE = '{"prompt": "2 + 2 =", "answer": "4"}'


class PromptRecord(NamedTuple):
    """A prompt, and its record.

    Attributes:
        prompt: text or list of messages, as in the record.
        chat: the prompt in the form of conversations, without an answer; a text if no other messages or tools belong to it.
        record: all fields that are not null, for the reward.
    """

    prompt: Any
    chat: ChatRecord | str
    record: Mapping[str, Any]


def read_prompt(record: Any) -> PromptRecord:
    """Read the prompt of a record: a text, or a list of messages that ends before an answer.

    As in conversations, the system message, the tools, and the `input` or `context` of an instruction belong to the prompt,
    and so does `history`, except next to a field of `LIST_FIELDS`.

    Raises:
        UserError: if the record has no prompt or an invalid one, the messages end with an answer, or the prompt needs an image,
            video or audio.
    """
    if not isinstance(record, dict):
        raise UserError(f"a prompt must be an object, not {short_repr(record)}: write {EXAMPLE}")
    fields = {name: value for name, value in record.items() if value is not None}
    name = _field(fields)
    if not name:
        raise UserError(f"no prompt: the fields are {short_repr([*record])}; write {EXAMPLE}")

    prompt = messages_from_json(fields[name])
    chat: ChatRecord | str
    if name in LIST_FIELDS:  # as in conversations, the list in such a field is complete, without the `history`
        chat = _chat_of_messages(prompt, fields)
    elif isinstance(prompt, str):
        chat = _chat_of_text(name, prompt, fields)
    elif isinstance(prompt, list):
        chat = _chat_of_messages(with_history(prompt, fields), fields)
    else:
        raise UserError(f"the prompt must be a text or a list of messages, not {short_repr(prompt)}: write {EXAMPLE}")
    return PromptRecord(prompt, chat, fields)


def _chat_of_text(name: str, prompt: str, fields: Mapping[str, Any]) -> ChatRecord | str:
    """Return the text of a prompt in the field `name`, or messages if other messages or tools belong to it."""
    if not prompt:
        raise UserError(f"the prompt is empty: write {EXAMPLE}")
    text = with_input(name, prompt, {key: fields[key] for key in _added(name) if key in fields})
    messages = [*history_messages(fields), plain_message("user", text)]
    check_media(fields, messages)
    if len(messages) == 1 and not _others(fields):
        return text
    return _chat_of_messages(messages, fields)


def _chat_of_messages(messages: Any, fields: Mapping[str, Any]) -> ChatRecord:
    """Return the conversation of a list of messages, or its JSON, with the system message and the tools of the record."""
    chat = read_record({"messages": messages, **_others(fields)})
    assert not isinstance(chat, Pair)
    check_media(fields, chat.messages)
    if chat.messages[-1]["role"] == "assistant":
        raise UserError(ALREADY_ANSWERED)
    return chat


def _field(fields: Mapping[str, Any]) -> str:
    """Return the name of the field with the prompt, the first of `FIELDS` that the record has; "": no such field."""
    for name in FIELDS:
        if fields.get(name) is not None:
            return name
    return ""


def _added(name: str) -> tuple[str, ...]:
    """Return the fields whose text belongs to the prompt in the field `name`."""
    return INPUT_FIELDS if name == "instruction" else ()


def _others(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the system message and the tools."""
    return {key: fields[key] for key in (*SYSTEM_FIELDS, *TOOL_FIELDS) if key in fields}


def fields_for_reward(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fields that often belong to a prompt, such as `context`, but are left to the reward."""
    for_reward = set[str]()
    for record in records:
        field = _field(record)
        in_prompt = {field, *_added(field)}
        for_reward |= {name for name in CONTEXT_FIELDS if record.get(name) and name not in in_prompt}
    return sorted(for_reward)


# A reward may need any field, so all are read.
PROMPTS = RecordKind("prompts", read_prompt, frozenset(), EXAMPLE)
