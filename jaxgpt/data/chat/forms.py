"""Forms of messages that a chat template reads: content as a text or parts, arguments of calls as an object or its JSON.

A template is a program, so the forms are found by rendering short conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from typing import Any

from jaxgpt.errors import UserError

PROBED = 1 << 18  # maximum number of characters of a short conversation that shows what a template reads and adds

SYSTEM = {"role": "system", "content": "Zq7system"}
FUNCTION = {"name": "Zq7function", "description": "Zq7", "parameters": {"type": "object", "properties": {}}}
# Messages before a question, and tools, in the order of trial: some templates need a system message or tools.
CONTEXTS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([], None),
    ([SYSTEM], None),
    ([], [{"type": "function", "function": FUNCTION}]),
    ([SYSTEM], [{"type": "function", "function": FUNCTION}]),
)
PROBE = "Zq7probe"  # content of a message that shows which forms of content a template reads
NAME = "Zq7name"
ARGUMENTS = {NAME: "Zq7value"}  # arguments of a call that show which forms of arguments a template reads

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str]


class MessageForms:
    """Converts messages to the forms that a template reads.

    A string becomes a list of one part if the template reads only lists of parts. A list of text parts becomes its
    concatenation if the template reads only strings. Without these changes, the template would not render the text.
    Likewise, arguments are passed as an object to a template that does not print their JSON, and as JSON to a template
    that needs JSON.

    Args:
        render: function that returns the template's text of messages and tools, and raises `UserError` if it fails.
    """

    def __init__(self, render: Render) -> None:
        self._render = render

    def readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its content and the arguments of its calls in the forms that the template reads."""
        message = self._with_readable_content(message)
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return message | {"tool_calls": [self._readable_call(call) for call in calls]}

    # Content.

    def _with_readable_content(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            if self._reads_text or not self._reads_parts:
                return message
            return message | {"content": [{"type": "text", "text": content}]}

        if not isinstance(content, list) or self._reads_parts or not self._reads_text:
            return message
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):  # other parts, such as images
            return message
        return message | {"content": "".join(texts)}

    @cached_property
    def _reads_text(self) -> bool:
        return self._reads_content(PROBE)

    @cached_property
    def _reads_parts(self) -> bool:
        return self._reads_content([{"type": "text", "text": PROBE}])

    def _reads_content(self, content: Any) -> bool:
        """Return whether the template renders the text of `content`, and not the field names of its parts."""
        question = {"role": "user", "content": content}
        for before, tools in CONTEXTS:
            with suppress(UserError):
                text = self._render([*(message | {"content": content} for message in before), question], tools)
                is_printed = any(field in text for field in ("'text'", '"text"'))
                return PROBE in text and not is_printed
        return False

    # Arguments of calls.

    def _readable_call(self, call: Any) -> Any:
        """Convert the arguments of a call; return a malformed call unchanged."""
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        given = function.get("arguments")
        arguments = given
        if isinstance(given, str) and not self._reads_json:
            arguments = _parsed(given)
        elif isinstance(given, Mapping) and self._reads_json and not self._reads_object:
            arguments = json.dumps(given, ensure_ascii=False)
        if arguments is given:
            return call
        changed = {**function, "arguments": arguments}
        return changed if function is call else {**call, "function": changed}

    @cached_property
    def _reads_json(self) -> bool:
        """Whether the template prints arguments that are given as JSON."""
        text = json.dumps(ARGUMENTS)
        return any(text in rendered for rendered in self._with_call(text))

    @cached_property
    def _reads_object(self) -> bool:
        return any(NAME in rendered for rendered in self._with_call(ARGUMENTS))

    def _with_call(self, arguments: Any) -> Iterator[str]:
        """Render short conversations with a call, in all combinations of context, content and result that may be needed."""
        call = {"id": "Zq7callid", "type": "function", "function": {"name": "Zq7function", "arguments": arguments}}
        answer = {"role": "assistant", "tool_calls": [call]}
        result = {"role": "tool", "name": "Zq7function", "tool_call_id": "Zq7callid", "content": PROBE}
        question = {"role": "user", "content": PROBE}
        for (before, tools), content, after in product(CONTEXTS, ({}, {"content": ""}), ([], [result])):
            messages = [*before, question, answer | content, *after]
            with suppress(UserError):
                yield self._render([self._with_readable_content(message) for message in messages], tools)


def _parsed(arguments: str) -> Any:
    """Parse arguments that are the JSON of an object; return other texts unchanged."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
