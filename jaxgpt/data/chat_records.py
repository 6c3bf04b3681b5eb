"""Records of conversations: turn the shapes that data sets use into one form, messages and tools.

The form matches OpenAI's chat API and transformers' `apply_chat_template`. It does not depend on a chat template.
docs/finetune.md lists the accepted shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.data.chat_template import for_templates
from jaxgpt.data.records import DECODER, Twice, repeats_key
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
CALLS = ("function_call", "tool_call")  # roles of a message whose text is the JSON of a call: LLaMA-Factory; ms-swift
LISTS = ("messages", "conversations", "conversation")  # fields with a list of messages
# Fields of a request and its answer.
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
)
ADDED = ("input", "context")  # fields to append to an instruction
# Fields without a defined place in a question.
BESIDE = (*ADDED, "instruction", "choices", "options", "passage", "document")
SYSTEM = ("system", "system_prompt")  # fields with the text of a system message
TOOLS = ("tools", "functions")  # fields with the functions that the assistant can call
HISTORY = "history"  # field with earlier pairs of a request and its answer
LABEL = "label"  # field that marks an answer as accepted (true) or rejected (false): KTO; next to messages, it may be a class
KTO = "kto_tag"  # LLaMA-Factory's name of this field, which has no other meaning
# Kinds of media: fields of a record, singular or plural, and placeholders in its texts.
MEDIA = ("image", "video", "audio")
MEDIA_FIELDS = tuple(name for kind in MEDIA for name in (kind, f"{kind}s"))
# All fields that are read.
FIELDS = frozenset({*LISTS, *sum(PAIRS, ()), *BESIDE, *SYSTEM, *TOOLS, HISTORY, LABEL, KTO, *MEDIA_FIELDS})
# Fields of a message that are converted.
TURN = (
    *("role", "from", "content", "value", "tool_calls", "function_call"),
    *("weight", "train", "loss", "train_detail"),
)
# Fields of a message that exclude it from the loss: OpenAI; Axolotl; ms-swift and XTuner.
MARKS = ("weight", "train", "loss")
PARTS = "train_detail"  # field of a message with the parts of its text that are targets: Axolotl

ANSWERED = "the prompt ends with a message of the assistant: end it with a message to answer"
EXAMPLE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'
SHAPES = (
    '"messages" (with role and content), "conversations" (with from and value), "prompt" and "completion", "instruction" '
    'and "output", or "question" and "answer"'
)


class UnusableRecord(UserError):
    """The error for a record of a known shape that cannot be used; `reason` describes a group of such records."""

    reason = ""


class RejectedAnswer(UnusableRecord):
    """The error for a record of preference data that is labelled as a rejected answer."""

    reason = "with a rejected answer"


class NoPlace(UnusableRecord):
    """The error for a record without place for an answer, or for a difference between answers, in a window."""

    reason = "that do not fit a window"


class ChatRecord(NamedTuple):
    """A conversation in the form of transformers' `apply_chat_template`.

    Attributes:
        messages: dicts with `role`, `content` (a string; missing: only calls) and the other fields of the message, if not null;
            `tool_calls` have an object or its JSON as `arguments`; `weight` 0: an assistant message that is not a target.
        tools: descriptions of functions, as in the record; None: no tools.
        may_be_rejected: whether the record has the label false, which marks a rejected answer in preference data for KTO, but
            may also describe the conversation.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    may_be_rejected: bool = False


class Pair(NamedTuple):
    """A prompt and its completion, which a model without a chat template concatenates."""

    prompt: str
    completion: str

    @property
    def chat(self) -> ChatRecord:
        """The prompt and the completion as messages."""
        return ChatRecord([_message("user", self.prompt), _message("assistant", self.completion)])


def function_names(functions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names in descriptions of functions, or in calls; a description may have no name."""
    names = set[str]()
    for each in functions:
        match each.get("function", each):
            case {"name": str(name)}:
                names.add(name)
    return names


def read_record(record: Any) -> ChatRecord | Pair:
    """Turn a record of any accepted shape into messages and tools, or into a prompt and its completion.

    Raises:
        RejectedAnswer: if the record is labelled as rejected.
        UserError: if the record has an unknown or ambiguous shape, or a field that is read has a wrong type.
    """
    if not isinstance(record, dict):
        raise UserError(f"a conversation must be an object, not {short_repr(record)}: write {EXAMPLE}")
    fields = {name: value for name, value in record.items() if value is not None}
    tools = _tools(fields)
    shape = _find_shape(fields, list(record))
    _check_label(KTO, fields)
    if isinstance(shape, str):
        messages = _messages(shape, fields[shape])
    else:
        _check_label(LABEL, fields)
        asked, answered = shape
        request = messages_from_json(fields[asked])
        answer = fields[answered]
        if not isinstance(request, str):
            answer = messages_from_json(answer)
        earlier = [*history_messages(fields)]

        # A prompt and its completion need no chat template, unless the record has more than these.
        are_texts = isinstance(request, str) and isinstance(answer, str)
        is_completion = shape == PAIRS[0] and are_texts
        if is_completion and not _system(fields) and not tools and not earlier:
            pair = Pair(request, answer)
            check_media(fields, pair.chat.messages)
            return pair
        messages = [*earlier, *_pair(asked, request, answered, answer, fields)]

    check_media(fields, messages)
    if messages[0]["role"] != "system":
        system = _system(fields)
        if system:
            messages = [_message("system", system), *messages]
    return ChatRecord(messages, tools, may_be_rejected=fields.get(LABEL) is False)


def _find_shape(fields: Mapping[str, Any], names: Sequence[str]) -> str | tuple[str, str]:
    """Return the field with a list of messages, or the fields of a request and its answer.

    Args:
        fields: the fields of a record that are not null.
        names: names of all fields, for errors.

    Raises:
        UserError: if the fields have no known shape, or several.
    """
    if "messages" in fields:
        return "messages"  # other fields are often a different form of these messages
    lists = [name for name in LISTS if name in fields]
    pairs = [pair for pair in PAIRS if fields.keys() >= set(pair)]
    shapes: list[str | tuple[str, str]] = [*lists, *pairs]
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


def _check_label(name: str, fields: Mapping[str, Any]) -> None:
    """Raise `RejectedAnswer` if the label of a request and its answer is false, as in preference data for KTO."""
    label = fields.get(name)
    if label is False or isinstance(label, Twice):
        raise RejectedAnswer(
            f"the {name} {short_repr(label)} marks a rejected answer, as in preference data: remove the record, or rename the "
            f"field if it has a different meaning"
        )


def check_media(fields: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]) -> None:
    """Check that no message has the placeholder of an image, video or audio in a field of the record, as in LLaVA's data."""
    for number, message in enumerate(messages, 1):
        for kind in MEDIA:
            has_field = bool(fields.get(kind) or fields.get(f"{kind}s"))
            if has_field and f"<{kind}>" in message.get("content", ""):
                raise UserError(
                    f"message {number} has <{kind}>, the placeholder of the {kind} of the record: only text is supported"
                )


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _pair(asked: str, request: Any, answered: str, answer: Any, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request and its answer, which are texts or lists of messages."""
    if isinstance(request, str):
        # A text and its continuation have no place for other fields.
        is_text = (asked, answered) == PAIRS[0]
        messages = [_message("user", request if is_text else with_input(asked, request, fields))]
    else:
        messages = [_without_loss(message) for message in _messages(asked, request)]
    if isinstance(answer, str):
        return [*messages, _message("assistant", answer)]
    return [*messages, *_messages(answered, answer)]


def with_input(asked: str, request: str, fields: dict[str, Any]) -> str:
    """Append the input of an instruction to it, after a line break; reject such fields of other requests."""
    present = [name for name in BESIDE if fields.get(name) and name != asked]
    added = [name for name in present if asked == "instruction" and name in ADDED]
    if len(present) != len(added) or len(added) > 1:
        raise UserError(
            f"the field {present[0]!r} has no defined place in {asked!r}: write the complete text into {asked!r}, or use "
            f'"messages"'
        )
    texts = [request, *(_text(fields[name], f"the field {name!r}") for name in added)]
    return "\n".join(text for text in texts if text)


def _without_loss(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt: it is not a target, even if the assistant wrote it."""
    return message | {"weight": 0} if message["role"] == "assistant" else message


def history_messages(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of earlier pairs of a request and its answer: `[["Hi", "Hello"], ...]`."""
    pairs = fields.get(HISTORY, [])
    if not isinstance(pairs, list):
        raise UserError(f"the field 'history' must be a list of pairs, not {short_repr(pairs)}")
    for pair in pairs:
        match pair:
            case [str() as request, str() as answer]:
                yield _message("user", request)
                yield _message("assistant", answer)
            case _:
                raise UserError(f"the field 'history' must have pairs of a request and its answer: {short_repr(pair)}")


def _system(fields: dict[str, Any]) -> str:
    """Return the text of the system message; "": the record has no field for it."""
    texts = [_text(fields[name], f"the field {name!r}") for name in SYSTEM if fields.get(name)]
    if len({text.strip() for text in texts}) > 1:
        raise UserError(f"the fields {' and '.join(map(repr, SYSTEM))} differ: remove one")
    return next(iter(texts), "")


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the list of tools, which may be the JSON of a list; None: no tools."""
    if fields.get("tools"):
        name = "tools"
    elif fields.get("functions"):
        name = "functions"
    else:
        return None
    tools = decoded(fields[name], f"the field {name!r}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"the field {name!r} must be a list of objects, or its JSON, not {short_repr(tools)}")
    if repeats_key(tools):
        raise UserError(f"the field {name!r} has a key that is given twice: remove one")
    if name == "functions":  # OpenAI's form before tools
        tools = [{"type": "function", "function": tool} for tool in tools]
    return tools or None


def _messages(name: str, turns: Any) -> list[dict[str, Any]]:
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
            messages[-1]["tool_calls"] += message["tool_calls"]  # calls of one message, each in its own: ms-swift
        else:
            messages.append(message)
        was_call = is_call
    return messages


def _turn(number: int, turn: Any) -> dict[str, Any]:
    """Convert one message, with role and content or with from and value."""
    where = f"message {number}"
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with role and content, not {short_repr(turn)}")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str):
        raise UserError(f"{where} has no role: {short_repr(turn)}")
    role = _role(role)
    _check_names(turn, role, where)
    content = turn.get("content")
    if content is None:
        content = turn.get("value")

    calls = turn.get("tool_calls") or turn.get("function_call")
    if role in CALLS:  # the content is the call
        role = "assistant"
        calls = _text(content, where)
        content = None
    message: dict[str, Any] = {"role": role}
    if not calls or content is not None:
        message["content"] = _text(content, where)
    message |= {name: value for name, value in turn.items() if name not in TURN}
    if calls:
        message["tool_calls"] = _calls(calls, where)
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
    """Check that a message with the names of two shapes has the same role and content in both."""
    other = turn.get("from")
    is_role = isinstance(other, str) and other.lower() in (*ROLES, *CALLS)  # otherwise, for example, a name
    if is_role and _speaker(str(other)) != _speaker(role):
        raise UserError(f"{where} has the role {short_repr(turn['role'])}, but is from {short_repr(other)}: remove one")
    content = turn.get("content")
    value = turn.get("value")
    if content is None or not isinstance(value, str):
        return
    if _text(content, where).strip() != value.strip():
        raise UserError(f"{where} has both content and value, which differ: remove one")


def _role(name: str) -> str:
    """Return the role with a name in data sets, in any case; other names as they are."""
    lower = name.lower()
    return lower if lower in CALLS else ROLES.get(lower, name)


def _speaker(name: str) -> str:
    """Map the names of a role in different shapes to one name."""
    role = _role(name)
    return "assistant" if role in CALLS else {"developer": "system"}.get(role, role)


def comparable(turn: Any) -> Any:
    """Return a message without null fields and with the usual names, to compare messages; an invalid message as it is."""
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


def _text(content: Any, where: str) -> str:
    """Return a text, or the joined text of parts such as `{"type": "text", "text": "Hi"}`."""
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
    converted = list[dict[str, Any]]()
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{where} has a call without the name of a function: {short_repr(call)}")
        others = {name: value for name, value in call.items() if value is not None} if function is not call else {}
        _check_arguments(function, where)
        arguments = _arguments(function.get("arguments"), where)
        converted.append({**others, "type": "function", "function": {**function, "arguments": arguments}})
    return converted


def _check_arguments(function: Mapping[str, Any], where: str) -> None:
    """Check that the arguments of a call do not have a different name: the call would lose them."""
    if function.get("arguments") is not None:
        return
    for name in ARGUMENTS:
        if function.get(name):
            raise UserError(
                f"{where} has a call with {name!r} instead of 'arguments': rename this field to 'arguments'"
            )


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """Check the arguments of a call, an object or its JSON, and return them as given; an empty object if they are missing."""
    if arguments is None or arguments == "":
        return {}
    parsed = decoded(arguments, f"the arguments of a call of {where}")
    if not isinstance(parsed, dict):
        raise UserError(f"{where} has a call with arguments that are not an object: {short_repr(arguments)}")
    if repeats_key(parsed):
        raise UserError(f"{where} has a call with a key that is given twice: {short_repr(parsed)}; remove one")
    return arguments if isinstance(arguments, str) else parsed


def messages_from_json(text: Any) -> Any:
    """Return the messages that a text holds as JSON, as some tables store them; other values as they are."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return text
    try:
        found = decoded(text, "a text")
    except UserError:
        return text
    are_messages = [isinstance(each, dict) and ("role" in each or "from" in each) for each in found]
    return found if found and all(are_messages) else text


def decoded(value: Any, what: str) -> Any:
    """Parse JSON that is stored as a string; return other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{what} is a string, but not valid JSON ({e}): {short_repr(value)}") from None
