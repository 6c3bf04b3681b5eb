"""Records of conversations: convert the shapes in data sets to a single form, messages and tools.

The form matches OpenAI's chat API and transformers' `apply_chat_template`. It does not depend on a chat template.
docs/finetune.md lists the accepted shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.data.chat_messages import (
    EXAMPLE,
    LISTS,
    decoded,
    messages_from_json,
    plain_message,
    read_messages,
    text_of,
)
from jaxgpt.data.records import Twice, repeats_key
from jaxgpt.errors import UserError, short_repr

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
LABEL = "label"  # field that marks an answer as accepted (true) or rejected (false): KTO; next to messages, possibly a class
KTO = "kto_tag"  # LLaMA-Factory's name of this field, which has no other meaning
# Kinds of media: fields of a record, singular or plural, and placeholders in its texts.
MEDIA = ("image", "video", "audio")
MEDIA_FIELDS = tuple(name for kind in MEDIA for name in (kind, f"{kind}s"))
# All fields that are read.
FIELDS = frozenset({*LISTS, *sum(PAIRS, ()), *BESIDE, *SYSTEM, *TOOLS, HISTORY, LABEL, KTO, *MEDIA_FIELDS})
ANSWERED = "the prompt ends with a message of the assistant: end it with a message to answer"
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
    """The error for a record that leaves no room for an answer, or for a difference between answers, in a window."""

    reason = "that do not fit a window"


class ChatRecord(NamedTuple):
    """A conversation in the form of transformers' `apply_chat_template`.

    Attributes:
        messages: dicts with `role`, `content` (a string; missing if there are only calls), and the other non-null fields. The
            `arguments` of `tool_calls` are an object or its JSON. Assistant messages that are not targets have the `weight` 0.
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
        return ChatRecord([plain_message("user", self.prompt), plain_message("assistant", self.completion)])


def read_record(record: Any) -> ChatRecord | Pair:
    """Convert a record of any accepted shape to messages and tools, or to a prompt and its completion.

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
        messages = read_messages(shape, fields[shape])
    else:
        _check_label(LABEL, fields)
        asked, answered = shape
        exchange = _read_exchange(asked, answered, fields, has_tools=tools is not None)
        if isinstance(exchange, Pair):
            check_media(fields, exchange.chat.messages)
            return exchange
        messages = exchange

    check_media(fields, messages)
    if messages[0]["role"] != "system":
        system = _system(fields)
        if system:
            messages = [plain_message("system", system), *messages]
    return ChatRecord(messages, tools, may_be_rejected=fields.get(LABEL) is False)


def _read_exchange(asked: str, answered: str, fields: dict[str, Any], has_tools: bool) -> Pair | list[dict[str, Any]]:
    """Return a request and its answer as messages, after the messages of earlier exchanges.

    A prompt and its completion stay a pair, which needs no chat template, unless the record has a system message, tools or a
    history.

    Args:
        asked: field with the request.
        answered: field with the answer.
        fields: the fields of the record that are not null.
        has_tools: whether the record has tools.
    """
    request = messages_from_json(fields[asked])
    answer = fields[answered]
    if not isinstance(request, str):
        answer = messages_from_json(answer)
    earlier = [*history_messages(fields)]

    are_texts = isinstance(request, str) and isinstance(answer, str)
    is_completion = (asked, answered) == PAIRS[0] and are_texts
    if is_completion and not _system(fields) and not has_tools and not earlier:
        return Pair(request, answer)
    return [*earlier, *_pair(asked, request, answered, answer, fields)]


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
    """Check that no message refers to an image, video or audio of the record by a placeholder, as in LLaVA's data."""
    for number, message in enumerate(messages, 1):
        for kind in MEDIA:
            has_field = bool(fields.get(kind) or fields.get(f"{kind}s"))
            if has_field and f"<{kind}>" in message.get("content", ""):
                raise UserError(
                    f"message {number} has <{kind}>, the placeholder of the {kind} of the record: only text is supported"
                )


def _pair(asked: str, request: Any, answered: str, answer: Any, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request and its answer, which are texts or lists of messages."""
    if isinstance(request, str):
        # A text and its continuation have no place for other fields.
        is_text = (asked, answered) == PAIRS[0]
        messages = [plain_message("user", request if is_text else with_input(asked, request, fields))]
    else:
        messages = [without_loss(message) for message in read_messages(asked, request)]
    if isinstance(answer, str):
        return [*messages, plain_message("assistant", answer)]
    return [*messages, *read_messages(answered, answer)]


def with_input(asked: str, request: str, fields: dict[str, Any]) -> str:
    """Append the input or context of an instruction after a line break; reject fields without a defined place."""
    present = [name for name in BESIDE if fields.get(name) and name != asked]
    added = [name for name in present if asked == "instruction" and name in ADDED]
    misplaced = [name for name in present if name not in added] + added[1:]
    if misplaced:
        raise UserError(
            f"the field {misplaced[0]!r} has no defined place in {asked!r}: write the complete text into {asked!r}, or use "
            f'"messages"'
        )
    texts = [request, *(text_of(fields[name], f"the field {name!r}") for name in added)]
    return "\n".join(text for text in texts if text)


def without_loss(message: dict[str, Any]) -> dict[str, Any]:
    """Exclude a message of a prompt from the targets, even if the assistant wrote it."""
    return message | {"weight": 0} if message["role"] == "assistant" else message


def history_messages(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of earlier pairs of a request and its answer: `[["Hi", "Hello"], ...]`."""
    pairs = fields.get(HISTORY, [])
    if not isinstance(pairs, list):
        raise UserError(f"the field 'history' must be a list of pairs, not {short_repr(pairs)}")
    for pair in pairs:
        match pair:
            case [str() as request, str() as answer]:
                yield plain_message("user", request)
                yield plain_message("assistant", answer)
            case _:
                raise UserError(f"the field 'history' must have pairs of a request and its answer: {short_repr(pair)}")


def _system(fields: dict[str, Any]) -> str:
    """Return the text of the system message; "": the record has no field for it."""
    texts = [text_of(fields[name], f"the field {name!r}") for name in SYSTEM if fields.get(name)]
    if len({text.strip() for text in texts}) > 1:
        raise UserError(f"the fields {' and '.join(map(repr, SYSTEM))} differ: remove one")
    return next(iter(texts), "")


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the list of tools, which the record may store as JSON; None: no tools."""
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
    if name == "functions":  # OpenAI's earlier form of tools
        tools = [{"type": "function", "function": tool} for tool in tools]
    return tools or None
