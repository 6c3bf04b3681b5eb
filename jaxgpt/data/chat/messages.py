"""Messages of conversations: convert the forms in data sets to a single form with a role, a content and calls.

The form matches OpenAI's chat API and transformers' `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxgpt.data.chat.calls import read_calls
from jaxgpt.data.chat.template import for_templates
from jaxgpt.data.files.lenient_json import parse_field
from jaxgpt.errors import UserError, short_repr

CALLS = ("function_call", "tool_call")  # roles of messages with a call as JSON text, in LLaMA-Factory and ms-swift
# Names of roles in data sets, in lower case. Any other role, such as developer, is left to the chat template.
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
    # Calls become messages of the assistant.
    "function_call": "function_call",
    "tool_call": "tool_call",
}
# Further roles of chat templates: a system message, and results or texts that the model reads.
FURTHER_ROLES = ("developer", "ipython", "environment", "documents")
LIST_FIELDS = ("messages", "conversations", "conversation")  # fields with a list of messages
# Fields that exclude a message from the loss, in data for OpenAI, Axolotl, ms-swift and XTuner, and verl (in this order).
LOSS_FIELDS = ("weight", "train", "loss", "loss_mask")
LOSS_OF_PARTS = "train_detail"  # field of a message with the parts of its text that are targets, in data for Axolotl
# Fields of a message that are converted; the other fields are kept.
CONVERTED = ("role", "from", "content", "value", "tool_calls", "function_call", *LOSS_FIELDS, LOSS_OF_PARTS)
MESSAGES_EXAMPLE = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
EXAMPLE = f'{{"messages": {MESSAGES_EXAMPLE}}}'


def plain_message(role: str, content: str) -> dict[str, Any]:
    """Return a message that is only a text."""
    return {"role": role, "content": content}


def read_messages(name: str, turns: Any) -> list[dict[str, Any]]:
    """Convert the list of messages in the field `name`.

    Raises:
        UserError: if the field is not a list of messages, or a message has no role or no content, contradicts itself, or holds
            more than text and calls.
    """
    turns = parse_field(turns, f"the field {name!r}")
    if isinstance(turns, (int, float)) and name not in LIST_FIELDS:  # a request or its answer
        raise UserError(
            f"the field {name!r} must be a text or a list of messages, not {short_repr(turns)}: write it in quotes"
        )
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{name} must be a list such as {MESSAGES_EXAMPLE}: {short_repr(turns)}")

    messages = list[dict[str, Any]]()
    previous = ""  # role of the previous message
    for number, turn in enumerate(turns, 1):
        where = f"message {number}"
        role = _role_of(turn, where)
        message = _message(turn, role, where)
        if role in CALLS and previous in CALLS and message.get("weight") == messages[-1].get("weight"):
            messages[-1]["tool_calls"] += message["tool_calls"]  # ms-swift writes each call separately
        else:
            messages.append(message)
        previous = role
    return messages


def comparable(turn: Any) -> Any:
    """Return a message in the form of templates, for comparisons; return an invalid message unchanged."""
    try:
        return _message(turn, _role_of(turn, "message"), "message")
    except UserError:
        return turn


def is_known_role(role: str) -> bool:
    """Return whether the role of a converted message is a role of common data sets and chat templates."""
    return role in ROLES or role in FURTHER_ROLES


def begins_with(turns: Sequence[Any], speaker: str) -> bool:
    """Return whether a list begins with a message of a speaker (user, assistant, system or tool), under any of its names."""
    match turns:
        case [{"role": str(name)} | {"from": str(name)}, *_]:
            return _speaker(_role(name)) == speaker
    return False


def _role_of(turn: Any, where: str) -> str:
    """Return the role of a message: a value of `ROLES`, or a name that is left to the chat template.

    Raises:
        UserError: if the message has no role, or two roles that differ.
    """
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with role and content, not {short_repr(turn)}")
    sender = turn.get("from")
    name = turn.get("role") or sender
    if not isinstance(name, str):
        raise UserError(f"{where} has no role: {short_repr(turn)}; add a role such as user")

    role = _role(name)
    # Next to a role, `from` may also be the name of a person.
    second = _role(sender) if isinstance(sender, str) else role
    if second in ROLES and _speaker(second) != _speaker(role):
        raise UserError(f"{where} has the role {short_repr(name)}, but is from {short_repr(sender)}: remove one")
    return role


def _role(name: str) -> str:
    """Return the role for a name in data sets, in upper or lower case; return other names unchanged."""
    return ROLES.get(name.strip().lower(), name)


def _speaker(role: str) -> str:
    """Return the speaker of a role: the assistant also writes calls, and developer is a newer name of system."""
    if role in CALLS:
        return "assistant"
    return "system" if role == "developer" else role


def _message(turn: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """Convert one message, which has `role` and `content`, or `from` and `value`; `role` is the result of `_role_of`."""
    content = _content_of(turn, where)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if role in CALLS:  # the content is the call
        role = "assistant"
        calls = text_of(content, where)
        content = None

    message: dict[str, Any] = {"role": role}
    tool_calls = read_calls(calls, where) if calls else []  # may be the JSON of an empty list
    if content is not None or not tool_calls:
        message["content"] = text_of(content, where)
    message |= {name: value for name, value in turn.items() if name not in CONVERTED}
    if tool_calls:
        message["tool_calls"] = tool_calls
    if role == "assistant" and not _is_target(turn, where):
        message["weight"] = 0
    return for_templates(message)


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
    """Return whether a message of the assistant is a target; raise `UserError` if its fields select only a part of it."""
    marks = {name: answer[name] for name in LOSS_FIELDS if answer.get(name) is not None}
    if isinstance(marks.get("loss"), float):  # a measured loss
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
