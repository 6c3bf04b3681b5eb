"""Render conversations with chat templates, and locate the text that the assistant wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxgpt.data.chat_sandbox import MARK, sandbox
from jaxgpt.errors import UserError, short_repr

RENDERED = 1 << 24  # maximum number of characters of a rendered conversation
PROBED = 1 << 18  # maximum number of characters of a short conversation that shows what a template reads and adds

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

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
ARGUMENTS = {"Zq7name": "Zq7value"}  # arguments of a call that show which forms of arguments a template reads
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the assistant's reasoning, in order of precedence


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str  # input for the tokenizer, with the names of special tokens
    spans: list[tuple[int, int]]  # [begin, end) of the characters in `{% generation %}`; empty without this tag


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check and copy a conversation: a list of messages with `role` and `content`, as in chat APIs.

    The template decides about roles and further keys, such as `name` and `tool_calls`. The content is a string, a list of
    parts, or null in a message with tool calls.

    Raises:
        UserError: if `messages` is empty or not a list, or a message has no role or no content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError(
            f'messages must be a list such as [{{"role": "user", "content": "Hi"}}]: {short_repr(messages)}'
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UserError(f"message {number} must have a role and a content: {short_repr(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise UserError(f"message {number} needs a role such as user: {short_repr(message)}")
        content = message.get("content")
        is_call = content is None and message.get("tool_calls")
        if not isinstance(content, (str, list)) and not is_call:
            raise UserError(f"message {number} needs a content, a string or a list of parts: {short_repr(message)}")
    return [dict(message) for message in messages]


class ChatTemplate:
    """A chat template, rendered as in transformers' `apply_chat_template`.

    A template is a program. It runs in Jinja's immutable sandbox, without access to files or to Python's internal attributes.
    Its output is limited to `RENDERED` characters, but its time and memory are unlimited. It is compiled on first use.

    Args:
        source: Jinja source.
        variables: variables of the template in addition to `messages`: `bos_token`, `eos_token`, `enable_thinking`, ... A
            token that the tokenizer declares as null has the value "" and renders as empty text; a template that prints an
            undeclared token fails.
        date: date for templates that include it, such as `2024-07-26`; empty: today.
        answer_tokens: names of special tokens that stay tokens in the assistant's messages, such as `<think>`.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        date: str = "",
        answer_tokens: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.variables = dict[str, Any](variables or {})
        for name, value in self.variables.items():
            if name.endswith("_token") and value == "":
                self.variables[name] = jinja2.Undefined(name=name)
        self.date = date
        self.answer_tokens = tuple(answer_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        limit: int = RENDERED,
    ) -> Rendered:
        """Render a conversation.

        Contents and arguments of calls are passed in the form that the template reads (`readable`).

        Args:
            messages: conversation, `[{"role": "user", "content": "Hi"}, ...]`.
            tools: descriptions of functions that the assistant may call, as JSON values; None: no tools.
            add_generation_prompt: end with the header of an assistant message.
            limit: maximum number of characters.

        Raises:
            UserError: if the messages are malformed, or the template rejects them, fails, or renders too much text.
        """
        return self._render(self.readable(messages), tools, add_generation_prompt, limit)

    def readable(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages with contents and arguments of calls in the form that the template reads.

        A string becomes a list of one part if the template reads only lists of parts. A list of text parts becomes its
        concatenation if the template reads only strings. Without these changes, the template would not render the text.
        Likewise, arguments are passed as an object to a template that does not print their JSON, and as JSON to a template
        that needs JSON.

        Raises:
            UserError: if the messages are malformed.
        """
        return [self._with_readable_calls(self._readable(message)) for message in check_messages(messages)]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool, limit: int
    ) -> Rendered:
        """Render messages in the form that the template reads, with at most `limit` characters."""
        variables: dict[str, Any] = {"documents": None} | self.variables
        variables["messages"] = [for_templates(message) for message in messages]
        variables["tools"] = None if tools is None else list(tools)
        marked = ""
        try:
            for part in self._template.generate(variables, add_generation_prompt=add_generation_prompt):
                marked += part
                if len(marked) > limit:
                    raise ValueError(f"the result has more than {limit:,} characters")
        except jinja2.TemplateSyntaxError as e:
            raise UserError(f"the chat template has an error: line {e.lineno}: {e.message}") from None
        except Exception as e:  # any exception of a template
            raise UserError(f"the chat template cannot render these messages: {str(e) or type(e).__name__}") from None

        text = ""
        spans: list[tuple[int, int]] = []
        for number, part in enumerate(marked.split(MARK)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return Rendered(text, spans)

    def _readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the form of content that the template reads."""
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
        return self._reads(PROBE)

    @cached_property
    def _reads_parts(self) -> bool:
        return self._reads([{"type": "text", "text": PROBE}])

    def _reads(self, content: Any) -> bool:
        """Return whether the template renders the text of a content without the names of the fields of its parts."""
        question = {"role": "user", "content": content}
        for before, tools in CONTEXTS:
            with suppress(UserError):
                messages = [*(message | {"content": content} for message in before), question]
                rendered = self._render(messages, tools, False, PROBED)
                is_printed = any(field in rendered.text for field in ("'text'", '"text"'))
                return PROBE in rendered.text and not is_printed
        return False

    def _with_readable_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the form of arguments that the template reads."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return message | {"tool_calls": [self._readable_call(call) for call in calls]}

    def _readable_call(self, call: Any) -> Any:
        """Convert the arguments of a call to the form that the template reads, JSON or an object."""
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
        return any(ARGUMENTS["Zq7name"] in rendered for rendered in self._with_call(ARGUMENTS))

    def _with_call(self, arguments: Any) -> Iterator[str]:
        """Render short conversations with a call, in all combinations of context, content and result that may be needed."""
        call = {"id": "Zq7callid", "type": "function", "function": {"name": "Zq7function", "arguments": arguments}}
        answer = {"role": "assistant", "tool_calls": [call]}
        result = {"role": "tool", "name": "Zq7function", "tool_call_id": "Zq7callid", "content": PROBE}
        question = {"role": "user", "content": PROBE}
        for (before, tools), content, after in product(CONTEXTS, ({}, {"content": ""}), ([], [result])):
            messages = [*before, question, answer | content, *after]
            with suppress(UserError):
                yield self._render([self._readable(message) for message in messages], tools, False, PROBED).text

    @cached_property
    def strings(self) -> frozenset[str]:
        """The string constants of the template's expressions, for example strings that it looks for in messages."""
        constants = self._syntax.find_all(jinja2.nodes.Const)
        return frozenset(node.value for node in constants if isinstance(node.value, str))

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the variables that the template reads."""
        return frozenset(jinja2.meta.find_undeclared_variables(self._syntax))

    @cached_property
    def _syntax(self) -> jinja2.nodes.Template:
        """The parsed template; an empty template if it has an error, which `render` reports."""
        try:
            return self._environment.parse(self.source)
        except jinja2.TemplateSyntaxError:
            return self._environment.parse("")

    @cached_property
    def _template(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        return sandbox(self.date)


def for_templates(message: Message) -> dict[str, Any]:
    """Convert a message as transformers does before it renders a template.

    Null fields are omitted, because many templates render them as text. The reasoning gets both names that templates read.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    for name in REASONING:
        if name in fields:
            return {"thinking": fields[name], **fields, "reasoning_content": fields[name]}
    return fields


def _parsed(arguments: str) -> Any:
    """Parse arguments that are the JSON of an object; return other texts unchanged."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
