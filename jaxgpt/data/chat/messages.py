"""Messages of conversations: convert the forms in data sets to a single form with a role, a content and calls.

The form matches OpenAI's chat API and transformers' `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.data.chat.calls import read_calls
from jaxgpt.data.chat.template import for_templates
from jaxgpt.data.files.lenient_json import parse_field
from jaxgpt.errors import UserError, short_repr

# Role of each name in data sets, in lower case. Any other name, such as developer, is left to the chat template.
ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALL_NAMES = ("function_call", "tool_call")  # names for a call as JSON text, in LLaMA-Factory and ms-swift
# Further roles of chat templates: a system message, results of tool calls (two names), and texts to read.
FURTHER_ROLES = ("developer", "ipython", "environment", "documents")
LIST_FIELDS = ("messages", "conversations", "conversation")  # fields with a list of messages
# Fields that exclude a message from the loss, in data for OpenAI, Axolotl, ms-swift and XTuner, and verl (in this order).
LOSS_FIELDS = ("weight", "train", "loss", "loss_mask")
LOSS_OF_PARTS = "train_detail"  # field of a message with the parts of its text that are targets, in data for Axolotl
# Fields of a message that are converted; the other fields are kept.
CONVERTED = ("role", "from", "content", "value", "tool_calls", "function_call", *LOSS_FIELDS, LOSS_OF_PARTS)
MESSAGES_EXAMPLE = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
EXAMPLE = f'{{"messages": {MESSAGES_EXAMPLE}}}'


class Converted(NamedTuple):
    """A converted message.

    Attributes:
        fields: the message for chat templates; `weight` 0: an answer that is not a target.
        is_call: whether the message was a call as JSON text (`CALL_NAMES`).
        is_target: whether the message is an answer that is a target.
    """

    fields: dict[str, Any]
    is_call: bool
    is_target: bool


def plain_message(role: str, content: str) -> dict[str, Any]:
    """Return a message that is only a text."""
    return {"role": role, "content": content}


def read_messages(name: str, turns: Any) -> list[dict[str, Any]]:
    """Convert the list of messages in the field `name`.

    Raises:
        UserError: if the field is not a list of messages, or a message has no role, has neither content nor calls, has an
            invalid call or loss field, contradicts itself, selects a part of an answer as a target, or holds more than text
            and calls.
    """
    turns = parse_field(turns, f"the field {name!r}")
    if isinstance(turns, (int, float)) and name not in LIST_FIELDS:  # a request or its answer
        raise UserError(
            f"the field {name!r} must be a text or a list of messages, not {short_repr(turns)}: write it in quotes"
        )
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{name} must be a list such as {MESSAGES_EXAMPLE}: {short_repr(turns)}")

    messages = list[Converted]()
    for number, turn in enumerate(turns, 1):
        message = _converted(turn, f"message {number}")
        if messages and _continues(messages[-1], message):
            messages[-1].fields["tool_calls"] += message.fields["tool_calls"]
        else:
            messages.append(message)
    return [message.fields for message in messages]


def comparable(turn: Any) -> Any:
    """Return a message in the form of templates, for comparisons; return an invalid message unchanged."""
    try:
        return _converted(turn, "message").fields
    except UserError:
        return turn


def is_known_role(role: str) -> bool:
    """Return whether the role of a converted message is a role of common data sets and chat templates."""
    return role in ROLES or role in FURTHER_ROLES


def begins_with(turns: Sequence[Any], speaker: str) -> bool:
    """Return whether a list begins with a message of a speaker (user, assistant, system or tool), under any of its names."""
    match turns:
        case [{"role": str(name)} | {"from": str(name)}, *_]:
            return _speaker(name) == speaker
    return False


def _continues(previous: Converted, message: Converted) -> bool:
    """Return whether two messages are calls of one answer: ms-swift writes each call separately."""
    return previous.is_call and message.is_call and previous.is_target == message.is_target


def _converted(turn: Any, where: str) -> Converted:
    """Convert one message, which has `role` and `content`, or `from` and `value`."""
    name = _name_of(turn, where)
    content = _content_of(turn, where)
    is_call = _normal(name) in CALL_NAMES
    if is_call:  # the content is the call, as JSON text
        calls = text_of(content, where)
        content = None
    else:
        calls = turn.get("tool_calls") or turn.get("function_call")
    tool_calls = read_calls(calls, where) if calls else []  # may be the JSON of an empty list

    role = _role(name)
    fields: dict[str, Any] = {"role": role}
    if content is not None or not tool_calls:
        fields["content"] = text_of(content, where)  # raises an error for a message without content and calls
    fields |= {field: value for field, value in turn.items() if field not in CONVERTED}
    if tool_calls:
        fields["tool_calls"] = tool_calls
    is_target = role == "assistant" and _is_target(turn, where)
    if role == "assistant" and not is_target:
        fields["weight"] = 0
    return Converted(for_templates(fields), is_call, is_target)


def _name_of(turn: Any, where: str) -> str:
    """Return the name of the role of a message, before its conversion to a role.

    Raises:
        UserError: if the message is not an object, has no role, or has two roles that differ.
    """
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with role and content, not {short_repr(turn)}")
    sender = turn.get("from")
    name = turn.get("role") or sender
    if not isinstance(name, str):
        raise UserError(f"{where} has no role: {short_repr(turn)}; add a role such as user")

    # Next to a role, `from` may also be the name of a person.
    if isinstance(sender, str) and _normal(sender) in ROLES and _speaker(sender) != _speaker(name):
        raise UserError(f"{where} has the role {short_repr(name)}, but is from {short_repr(sender)}: remove one")
    return name


def _normal(name: str) -> str:
    """Return a name in the spelling of `ROLES`: in lower case, without white space at the ends."""
    return name.strip().lower()


def _role(name: str) -> str:
    """Return the role for a name; return unknown names unchanged."""
    return ROLES.get(_normal(name), name)


def _speaker(name: str) -> str:
    """Return the role for a name, and system for developer, which is a newer name of system."""
    role = _role(name)
    return "system" if role == "developer" else role


def _content_of(turn: Mapping[str, Any], where: str) -> Any:
    """Return the content of a message, or its value; raise `UserError` if it has both and they differ."""
    content = turn.get("content")
    value = turn.get("value")
    if content is None:
        return value
    if isinstance(value, str) and text_of(content, where).strip() != value.strip():
        raise UserError(f"{where} has both content and value, which differ: remove one")
    return content


def _is_target(answer: Mapping[str, Any], where: str) -> bool:
    """Return whether a message of the assistant is a target.

    Raises:
        UserError: if its fields for the loss are invalid, contradict each other, or select only a part of the message.
    """
    marks = {name: answer[name] for name in LOSS_FIELDS if answer.get(name) is not None}
    loss = marks.get("loss")
    if isinstance(loss, float) and loss not in (0, 1):  # a measured loss; tables may store the marks 0 and 1 as floats
        del marks["loss"]
    for name, value in marks.items():
        if value not in (0, 1):  # includes booleans
            raise UserError(f"{where} has the {name} {short_repr(value)}: use 1, or 0 for no loss on this message")
    if len(set(marks.values())) > 1:
        given = " and ".join(f"the {name} {short_repr(value)}" for name, value in marks.items())
        raise UserError(f"{where} has {given}, which contradict each other: remove one")

    is_target = 0 not in marks.values()
    if is_target and answer.get(LOSS_OF_PARTS):
        raise UserError(
            f"{where} has {LOSS_OF_PARTS!r}, which selects parts of an answer as targets: only complete answers can be "
            f"selected, with weight"
        )
    return is_target


def text_of(content: Any, where: str) -> str:
    """Return a text, or the joined text of parts such as `{"type": "text", "text": "Hi"}`.

    Raises:
        UserError: if the content is missing, or is not text.
    """
    if isinstance(content, str):
        return content
    if content is None:
        raise UserError(f"{where} has no content: write a text, or omit the message")
    if not isinstance(content, list):
        raise UserError(
            f"{where} has a content that is neither a text nor a list of text parts: {short_repr(content)}; write a text"
        )
    texts = list[str]()
    for part in content:
        match part:
            case str(text) | {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": kind} if kind != "text":
                raise UserError(f"{where} has a part of the type {short_repr(kind)}: only text is supported")
            case _:
                raise UserError(f"{where} has a part that is not a text: {short_repr(part)}; write a text")
    return "".join(texts)


def messages_from_json(text: Any) -> Any:
    """Parse messages that are stored as JSON text, as in some tables; return other values unchanged."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return text
    try:
        items = parse_field(text, "a text")
    except UserError:
        return text
    are_messages = [isinstance(item, dict) and ("role" in item or "from" in item) for item in items]
    return items if items and all(are_messages) else text
