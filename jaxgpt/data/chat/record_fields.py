"""Fields of a record next to its messages, or next to a request and its answer: their names, and how each is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxgpt.data.chat.messages import plain_message, text_of
from jaxgpt.data.files.lenient_json import parse_field, repeats_key
from jaxgpt.errors import UserError, short_repr

INPUT_FIELDS = ("input", "context")  # fields to append to an instruction
# Fields that often belong to a request, but have no defined place in a question.
CONTEXT_FIELDS = (*INPUT_FIELDS, "instruction", "choices", "options", "passage", "document")
SYSTEM_FIELDS = ("system", "system_prompt")  # fields with the text of a system message
# Fields with the functions that the assistant can call; `functions` is OpenAI's earlier form.
TOOL_FIELDS = ("tools", "functions")
HISTORY = "history"  # field with earlier pairs of a request and its answer
# Kinds of media: fields of a record, singular or plural, and placeholders in its texts.
MEDIA = ("image", "video", "audio")
MEDIA_FIELDS = tuple(name for kind in MEDIA for name in (kind, f"{kind}s"))
# Error for a prompt without a request to answer, in preference pairs and in prompts for rewards.
ALREADY_ANSWERED = "the prompt ends with a message of the assistant: end it with a message to answer"


def with_input(name: str, request: str, fields: Mapping[str, Any]) -> str:
    """Append the input or context of an instruction after a line break; reject fields without a defined place.

    Args:
        name: field with the request.
        request: text of the request.
        fields: the fields of the record that are not null.
    """
    present = [other for other in CONTEXT_FIELDS if fields.get(other) and other != name]
    inputs = [other for other in present if name == "instruction" and other in INPUT_FIELDS]
    added = inputs[:1]  # an instruction has a place for a single input
    misplaced = [other for other in present if other not in added]
    if misplaced:
        raise UserError(
            f"the field {misplaced[0]!r} has no defined place in {name!r}: write the complete text into {name!r}, or use "
            f'"messages"'
        )
    texts = [request, *(text_of(fields[other], f"the field {other!r}") for other in added)]
    return "\n".join(text for text in texts if text)


def history_messages(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
                raise UserError(
                    f"the field 'history' must have pairs of a request and its answer, not {short_repr(pair)}"
                )


def system_text(fields: Mapping[str, Any]) -> str:
    """Return the text of the system message, or "" without a system message; raise `UserError` if two fields differ."""
    texts = [text_of(fields[name], f"the field {name!r}") for name in SYSTEM_FIELDS if fields.get(name)]
    if len({text.strip() for text in texts}) > 1:
        raise UserError(f"the fields {' and '.join(map(repr, SYSTEM_FIELDS))} differ: remove one")
    return next(iter(texts), "")


def read_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the list of tools; None: no tools.

    Raises:
        UserError: if a field is not a list of tools or has a duplicate key, or both fields are given and describe different
            functions.
    """
    given = list[list[dict[str, Any]]]()
    for name in TOOL_FIELDS:
        tools = _tools_of(name, fields[name]) if fields.get(name) else []
        if tools:  # the JSON of a list may be empty
            given.append(tools)
    if not given:
        return None

    descriptions = [[tool.get("function", tool) for tool in tools] for tools in given]
    if descriptions[0] != descriptions[-1]:
        raise UserError(f"the fields {' and '.join(map(repr, TOOL_FIELDS))} describe different functions: remove one")
    return given[0]


def _tools_of(name: str, tools: Any) -> list[dict[str, Any]]:
    """Return the list of tools in a field, which may store it as JSON."""
    tools = parse_field(tools, f"the field {name!r}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"the field {name!r} must be a list of objects, or its JSON, not {short_repr(tools)}")
    if repeats_key(tools):
        raise UserError(f"the field {name!r} has a key that is given twice: remove one")
    if name == "functions":
        return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return tools


def check_media(fields: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]) -> None:
    """Check that no message refers to an image, video or audio of the record by a placeholder, as in LLaVA's data."""
    for number, message in enumerate(messages, 1):
        for kind in MEDIA:
            has_field = bool(fields.get(kind) or fields.get(f"{kind}s"))
            if has_field and f"<{kind}>" in message.get("content", ""):
                raise UserError(
                    f"message {number} has <{kind}>, the placeholder of the {kind} of the record: only text is supported"
                )
