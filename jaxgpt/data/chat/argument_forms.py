"""Forms of the arguments of calls that a chat template reads: an object, or its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any

from jaxgpt.data.chat.content_forms import PROBE, ContentForms
from jaxgpt.data.chat.probes import CONTEXTS, Render
from jaxgpt.errors import UserError

NAME = "Zq7name"
ARGUMENTS = {NAME: "Zq7value"}  # arguments of the call in short conversations


class ArgumentForms:
    """Converts the arguments of calls to the form that a template reads.

    Arguments become an object for a template that does not print their JSON, and JSON for a template that needs it.

    Args:
        render: renders messages and tools with the template.
        contents: converts the content of the short conversations that are rendered.
    """

    def __init__(self, render: Render, contents: ContentForms) -> None:
        self._render = render
        self._contents = contents

    def readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the arguments of its calls in the form that the template reads."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return message | {"tool_calls": [self._readable_call(call) for call in calls]}

    def _readable_call(self, call: Any) -> Any:
        """Convert the arguments of a call, or of a function alone; return a malformed call unchanged."""
        if not isinstance(call, Mapping):
            return call
        if "function" not in call:
            return self._readable_function(call)
        function = call["function"]
        if not isinstance(function, Mapping):
            return call
        return {**call, "function": self._readable_function(function)}

    def _readable_function(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert the arguments of a called function, if necessary."""
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._reads_json:
            return {**function, "arguments": _parsed(arguments)}
        if isinstance(arguments, Mapping) and self._reads_json and not self._reads_object:
            return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return function

    @cached_property
    def _reads_json(self) -> bool:
        """Whether the template prints arguments that are given as JSON."""
        text = json.dumps(ARGUMENTS)
        return any(text in rendered for rendered in self._renderings(text))

    @cached_property
    def _reads_object(self) -> bool:
        """Whether the template prints the names of arguments that are given as an object."""
        return any(NAME in rendered for rendered in self._renderings(ARGUMENTS))

    def _renderings(self, arguments: Any) -> Iterator[str]:
        """Render short conversations with a call of these arguments; skip those that the template rejects.

        A template may need a system message, tools, the content of the call's message, or the result of the call.
        """
        function = {"name": "Zq7function", "arguments": arguments}
        call = {"id": "Zq7callid", "type": "function", "function": function}
        question = {"role": "user", "content": PROBE}
        answer = {"role": "assistant", "tool_calls": [call]}
        result = {"role": "tool", "name": "Zq7function", "tool_call_id": "Zq7callid", "content": PROBE}
        for context, content, after in product(CONTEXTS, ({}, {"content": ""}), ([], [result])):
            messages = [*context.before, question, answer | content, *after]
            try:
                rendered = self._render([self._contents.readable(message) for message in messages], context.tools)
            except UserError:
                continue
            yield rendered


def _parsed(arguments: str) -> Any:
    """Parse arguments that are the JSON of an object; return other texts unchanged."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
