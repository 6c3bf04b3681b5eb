"""Messages of conversations: convert the forms in data sets to a single form with a role, a content and calls.

The form matches OpenAI's chat API and transformers' `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxgpt.data.chat_template import for_templates
from jaxgpt.data.records import DECODER, repeats_key
from jaxgpt.errors import UserError, short_repr

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
}
# Other names of the arguments of a call, which templates do not read.
ARGUMENTS = ("parameters", "args", "input", "kwargs")
CALLS = ("function_call", "tool_call")  # roles of messages that hold a call as JSON text: LLaMA-Factory; ms-swift
LISTS = ("messages", "conversations", "conversation")  # fields with a list of messages
# Fields of a message that are converted.
TURN = (
    *("role", "from", "content", "value", "tool_calls", "function_call"),
    *("weight", "train", "loss", "train_detail"),
)
# Fields of a message that exclude it from the loss: OpenAI; Axolotl; ms-swift and XTuner.
MARKS = ("weight", "train", "loss")
PARTS = "train_detail"  # field of a message with the parts of its text that are targets: Axolotl
EXAMPLE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'


def plain_message(role: str, content: str) -> dict[str, Any]:
    """Return a message that is only a text."""
    return {"role": role, "content": content}


def read_messages(name: str, turns: Any) -> list[dict[str, Any]]:
    """Convert the list of messages in the field `name`."""
    turns = decoded(turns, f"the field {name!r}")
    if isinstance(turns, (int, float)) and name not in LISTS:  # a request or its answer
        raise UserError(
            f"the field {name!r} must be a text or a list of messages, not {short_repr(turns)}: write it in quotes"
        )
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{name} must be a list such as {EXAMPLE.partition(': ')[2][:-1]}: {short_repr(turns)}")
    messages = list[dict[str, Any]]()
    was_call = False
    for number, turn in enumerate(turns, 1):
        message = _turn(number, turn)
        is_call = _role(turn.get("role") or turn.get("from")) in CALLS
        if is_call and was_call and message.get("weight") == messages[-1].get("weight"):
            messages[-1]["tool_calls"] += message["tool_calls"]  # ms-swift writes each call separately
        else:
            messages.append(message)
        was_call = is_call
    return messages


def _turn(number: int, turn: Any) -> dict[str, Any]:
    """Convert one message, which has `role` and `content`, or `from` and `value`."""
    where = f"message {number}"
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with role and content, not {short_repr(turn)}")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str):
        raise UserError(f"{where} has no role: {short_repr(turn)}")
    role = _role(role)
    _check_names(turn, role, where)

    # The content, and the calls of functions.
    content = turn.get("content")
    if content is None:
        content = turn.get("value")
    calls = turn.get("tool_calls") or turn.get("function_call")
    if role in CALLS:  # the content is the call
        role = "assistant"
        calls = text_of(content, where)
        content = None
    tool_calls = _calls(calls, where) if calls else []  # may be the JSON of an empty list
    message: dict[str, Any] = {"role": role}
    if not tool_calls or content is not None:
        message["content"] = text_of(content, where)
    message |= {name: value for name, value in turn.items() if name not in TURN}
    if tool_calls:
        message["tool_calls"] = tool_calls

    # Only answers are targets, except answers with the weight 0.
    is_target = role == "assistant" and bool(_weight(turn, where))
    if is_target and turn.get(PARTS):
        raise UserError(
            f"{where} has {PARTS!r}, which selects parts of an answer as targets: only complete answers can be selected, with "
            f"weight"
        )
    if role == "assistant" and not is_target:
        message["weight"] = 0
    return for_templates(message)


def _check_names(turn: Mapping[str, Any], role: str, where: str) -> None:
    """Check that a message with the fields of two shapes has the same role and the same content in both."""
    other = turn.get("from")
    is_role = isinstance(other, str) and other.lower() in (*ROLES, *CALLS)  # not, for example, a person's name
    if is_role and _speaker(str(other)) != _speaker(role):
        raise UserError(f"{where} has the role {short_repr(turn['role'])}, but is from {short_repr(other)}: remove one")
    content = turn.get("content")
    value = turn.get("value")
    if content is None or not isinstance(value, str):
        return
    if text_of(content, where).strip() != value.strip():
        raise UserError(f"{where} has both content and value, which differ: remove one")


def _role(name: str) -> str:
    """Return the role for a name in data sets, in upper or lower case; return other names unchanged."""
    lower = name.lower()
    return lower if lower in CALLS else ROLES.get(lower, name)


def _speaker(name: str) -> str:
    """Return the same name for all names of a role, in any shape."""
    role = _role(name)
    return "assistant" if role in CALLS else {"developer": "system"}.get(role, role)


def comparable(turn: Any) -> Any:
    """Return a message in the form of templates, for comparisons; return an invalid message unchanged."""
    try:
        return _turn(1, turn)
    except UserError:
        return turn


def is_speaker(turns: Sequence[Any], speaker: str) -> bool:
    """Return whether a list begins with a message of a speaker (user, assistant, system or tool), under any of its names."""
    match turns:
        case [{"role": str(name)} | {"from": str(name)}, *_]:
            return _speaker(name) == speaker
    return False


def _weight(turn: Mapping[str, Any], where: str) -> int:
    """Return 0 if the message is not a target, otherwise 1."""
    marks = {name: turn[name] for name in MARKS if turn.get(name) is not None}
    if isinstance(marks.get("loss"), float):  # a measured loss
        del marks["loss"]
    for name, value in marks.items():
        if value not in (0, 1):  # includes booleans
            raise UserError(f"{where} has the {name} {short_repr(value)}: use 1, or 0 for no loss on this message")
    if len(set(marks.values())) > 1:
        given = " and ".join(f"the {name} {short_repr(value)}" for name, value in marks.items())
        raise UserError(f"{where} has {given}, which contradict each other: remove one")
    return int(next(iter(marks.values()), 1))


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
        raise UserError(f"{where} has a content that is neither a text nor a list of text parts: {short_repr(content)}")
    texts = list[str]()
    for part in content:
        match part:
            case str() | {"type": "text", "text": str()}:
                texts.append(part if isinstance(part, str) else part["text"])
            case {"type": kind} if kind != "text":
                raise UserError(f"{where} has a part of the type {short_repr(kind)}: only text is supported")
            case _:
                raise UserError(f"{where} has a part that is not a text: {short_repr(part)}")
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Convert calls to `{"type": "function", "function": {"name": ..., "arguments": ...}}`, with ids if given."""
    calls = decoded(calls, f"the call of {where}")
    if not isinstance(calls, list):
        calls = [calls]
    converted = list[dict[str, Any]]()
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{where} has a call without the name of a function: {short_repr(call)}")
        others = {}  # such as an id
        if function is not call:
            others = {name: value for name, value in call.items() if value is not None}
        _check_arguments(function, where)
        arguments = _arguments(function.get("arguments"), where)
        converted.append({**others, "type": "function", "function": {**function, "arguments": arguments}})
    return converted


def _check_arguments(function: Mapping[str, Any], where: str) -> None:
    """Check that the arguments of a call have the name `arguments`: under a different name, they would be lost."""
    if function.get("arguments") is not None:
        return
    for name in ARGUMENTS:
        if function.get(name):
            raise UserError(
                f"{where} has a call with {name!r} instead of 'arguments': rename this field to 'arguments'"
            )


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """Check the arguments of a call, an object or its JSON, and return them unchanged; if missing, an empty object."""
    if arguments is None or arguments == "":
        return {}
    parsed = decoded(arguments, f"the arguments of a call of {where}")
    if not isinstance(parsed, dict):
        raise UserError(f"{where} has a call with arguments that are not an object: {short_repr(arguments)}")
    if repeats_key(parsed):
        raise UserError(f"{where} has a call with a key that is given twice: {short_repr(parsed)}; remove one")
    return arguments if isinstance(arguments, str) else parsed


def messages_from_json(text: Any) -> Any:
    """Parse messages that are stored as JSON text, as in some tables; return other values unchanged."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return text
    try:
        found = decoded(text, "a text")
    except UserError:
        return text
    are_messages = [isinstance(each, dict) and ("role" in each or "from" in each) for each in found]
    return found if found and all(are_messages) else text


def decoded(value: Any, what: str) -> Any:
    """Parse JSON that is stored as a string; return other values unchanged. Raises `UserError` for invalid JSON."""
    if not isinstance(value, str):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{what} is a string, but not valid JSON ({e}): {short_repr(value)}") from None


def function_names(functions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names in descriptions of functions, or in calls; a description may have no name."""
    names = set[str]()
    for each in functions:
        match each.get("function", each):
            case {"name": str(name)}:
                names.add(name)
    return names
