"""Records of conversations: convert the shapes in data sets to a single form, messages and tools.

The form matches OpenAI's chat API and transformers' `apply_chat_template`. It does not depend on a chat template.
docs/finetune.md lists the accepted shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jaxgpt.data.chat.messages import EXAMPLE, LIST_FIELDS, messages_from_json, plain_message, read_messages, text_of
from jaxgpt.data.files.lenient_json import Twice, parse_field, repeats_key
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
INPUT_FIELDS = ("input", "context")  # fields to append to an instruction
# Fields that often belong to a request, but have no defined place in a question.
CONTEXT_FIELDS = (*INPUT_FIELDS, "instruction", "choices", "options", "passage", "document")
SYSTEM_FIELDS = ("system", "system_prompt")  # fields with the text of a system message
# Fields with the functions that the assistant can call; functions is OpenAI's earlier form.
TOOL_FIELDS = ("tools", "functions")
HISTORY = "history"  # field with earlier pairs of a request and its answer
# Field that marks an answer as accepted (true) or rejected (false) in data for KTO. Next to messages, the field may also be a
# class label.
LABEL = "label"
KTO = "kto_tag"  # LLaMA-Factory's name of such a field, which always marks answers
# Kinds of media: fields of a record, singular or plural, and placeholders in its texts.
MEDIA = ("image", "video", "audio")
MEDIA_FIELDS = tuple(name for kind in MEDIA for name in (kind, f"{kind}s"))
# All fields that are read.
OTHER_FIELDS = (*SYSTEM_FIELDS, *TOOL_FIELDS, HISTORY, LABEL, KTO, *MEDIA_FIELDS)
FIELDS = frozenset([*LIST_FIELDS, *chain(*EXCHANGES), *CONTEXT_FIELDS, *OTHER_FIELDS])
ALREADY_ANSWERED = "the prompt ends with a message of the assistant: end it with a message to answer"
SHAPES = (
    '"messages" (with role and content), "conversations" (with from and value), "prompt" and "completion", "instruction" '
    'and "output", or "question" and "answer"'
)


class UnusableRecord(UserError):
    """The error for a record of a known shape that cannot be used; `reason` describes all records with this error."""

    reason = ""


class RejectedAnswer(UnusableRecord):
    """The error for a record of preference data that is labelled as a rejected answer."""

    reason = "with a rejected answer"


class DoesNotFit(UnusableRecord):
    """The error for a record that leaves no room for an answer, or for a difference between answers, in a window."""

    reason = "that do not fit a window"


def reason_of(error: UserError, otherwise: str) -> str:
    """Return the description of all records with an error; `otherwise`: the description if the error has no reason."""
    return error.reason if isinstance(error, UnusableRecord) else otherwise


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
    if isinstance(shape, ExchangeFields):
        _check_label(LABEL, fields)
        pair_or_messages = _read_exchange(shape, fields, has_tools=tools is not None)
        if isinstance(pair_or_messages, Pair):
            check_media(fields, pair_or_messages.chat.messages)
            return pair_or_messages
        messages = pair_or_messages
    else:
        messages = read_messages(shape, fields[shape])

    check_media(fields, messages)
    if messages[0]["role"] != "system":
        system = _system(fields)
        if system:
            messages = [plain_message("system", system), *messages]
    return ChatRecord(messages, tools, may_be_rejected=fields.get(LABEL) is False)


def _read_exchange(exchange: ExchangeFields, fields: dict[str, Any], has_tools: bool) -> Pair | list[dict[str, Any]]:
    """Return a request and its answer as messages, after the messages of earlier exchanges.

    A prompt and its completion stay a pair, which needs no chat template, unless the record has a system message, tools or a
    history.

    Args:
        exchange: fields of the request and the answer.
        fields: the fields of the record that are not null.
        has_tools: whether the record has tools.
    """
    request = messages_from_json(fields[exchange.request])
    answer = fields[exchange.answer]
    if not isinstance(request, str):
        answer = messages_from_json(answer)
    earlier = [*history_messages(fields)]

    are_texts = isinstance(request, str) and isinstance(answer, str)
    needs_template = bool(_system(fields) or has_tools or earlier)
    if exchange == COMPLETION and are_texts and not needs_template:
        return Pair(request, answer)

    if not isinstance(request, str):
        asked = [without_loss(message) for message in read_messages(exchange.request, request)]
    elif exchange == COMPLETION:  # a prompt to complete has no place for other fields
        asked = [plain_message("user", request)]
    else:
        asked = [plain_message("user", with_input(exchange.request, request, fields))]
    if isinstance(answer, str):
        answered = [plain_message("assistant", answer)]
    else:
        answered = read_messages(exchange.answer, answer)
    return [*earlier, *asked, *answered]


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


def with_input(name: str, request: str, fields: dict[str, Any]) -> str:
    """Append the input or context of an instruction after a line break; reject fields without a defined place.

    Args:
        name: field with the request.
        request: text of the request.
        fields: the fields of the record that are not null.
    """
    present = [other for other in CONTEXT_FIELDS if fields.get(other) and other != name]
    added = [other for other in present if name == "instruction" and other in INPUT_FIELDS]
    misplaced = [other for other in present if other not in added] + added[1:]
    if misplaced:
        raise UserError(
            f"the field {misplaced[0]!r} has no defined place in {name!r}: write the complete text into {name!r}, or use "
            f'"messages"'
        )
    texts = [request, *(text_of(fields[other], f"the field {other!r}") for other in added)]
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
    texts = [text_of(fields[name], f"the field {name!r}") for name in SYSTEM_FIELDS if fields.get(name)]
    if len({text.strip() for text in texts}) > 1:
        raise UserError(f"the fields {' and '.join(map(repr, SYSTEM_FIELDS))} differ: remove one")
    return next(iter(texts), "")


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the list of tools; None: no tools.

    Raises:
        UserError: if a field is not a list of tools, or both fields are given and describe different functions.
    """
    given = list[list[dict[str, Any]]]()
    for name in TOOL_FIELDS:
        tools = _read_tools(name, fields[name]) if fields.get(name) else []
        if tools:  # the JSON of a list may be empty
            given.append(tools)
    if not given:
        return None

    descriptions = [[tool.get("function", tool) for tool in tools] for tools in given]
    if descriptions[0] != descriptions[-1]:
        raise UserError(f"the fields {' and '.join(map(repr, TOOL_FIELDS))} describe different functions: remove one")
    return given[0]


def _read_tools(name: str, tools: Any) -> list[dict[str, Any]]:
    """Return the list of tools in a field, which may store it as JSON."""
    tools = parse_field(tools, f"the field {name!r}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"the field {name!r} must be a list of objects, or its JSON, not {short_repr(tools)}")
    if repeats_key(tools):
        raise UserError(f"the field {name!r} has a key that is given twice: remove one")
    if name == "functions":
        return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return tools
