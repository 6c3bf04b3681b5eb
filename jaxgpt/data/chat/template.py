"""Render conversations with chat templates, and locate the text that the assistant wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxgpt.data.chat.argument_forms import ArgumentForms
from jaxgpt.data.chat.content_forms import ContentForms
from jaxgpt.data.chat.probes import PROBED
from jaxgpt.data.chat.sandbox import MARK, sandbox
from jaxgpt.errors import UserError, short_repr

RENDERED = 1 << 24  # maximum number of characters of a rendered conversation

# Keys of the assistant's reasoning in messages, in order of precedence.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str  # input for the tokenizer, with the names of special tokens
    spans: list[tuple[int, int]]  # [begin, end) of the characters in `{% generation %}`; empty without this tag


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check and copy a conversation: a list of messages with `role` and `content`, as in chat APIs.

    The template interprets the roles and further keys, such as `name` and `tool_calls`. The content is a string, a list of
    parts, or null in a message with tool calls.

    Raises:
        UserError: if `messages` is empty or not a list, or a message is not an object, has no role, or has neither a valid
            content nor tool calls.
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
        answer_tokens: added tokens, special or not, that stay tokens in the assistant's messages, such as `<think>`.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        date: str = "",
        answer_tokens: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.variables = dict[str, Any]()
        for name, value in (variables or {}).items():
            is_null_token = name.endswith("_token") and value == ""
            self.variables[name] = jinja2.Undefined(name=name) if is_null_token else value
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

        Raises:
            UserError: if the messages are malformed.
        """
        checked = check_messages(messages)
        with_contents = [self._contents.readable(message) for message in checked]
        return [self._arguments.readable(message) for message in with_contents]

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
            problem = _why_not_rendered(e, variables["messages"])
            raise UserError(f"the chat template cannot render these messages: {problem}") from None

        # Remove the marks: every second part is the text of a `{% generation %}`.
        text = ""
        spans: list[tuple[int, int]] = []
        for number, part in enumerate(marked.split(MARK)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return Rendered(text, spans)

    @cached_property
    def _contents(self) -> ContentForms:
        return ContentForms(self._probe)

    @cached_property
    def _arguments(self) -> ArgumentForms:
        return ArgumentForms(self._probe, self._contents)

    def _probe(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """Render a short conversation that shows what the template reads (`probes`)."""
        return self._render(messages, tools, add_generation_prompt=False, limit=PROBED).text

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


def _why_not_rendered(error: Exception, messages: Sequence[Message]) -> str:
    """Return why a template failed: the error's message, or that it reads the content of a message that has only calls."""
    needs_content = isinstance(error, jinja2.UndefinedError) and "'content'" in str(error)
    if needs_content:
        for number, message in enumerate(messages, 1):
            if "content" not in message:  # a message with `tool_calls` (`check_messages`)
                return (
                    f"it reads the content of message {number}, which has only tool_calls; use a template that supports "
                    f"tools, or write the calls as text in the content"
                )
    return str(error) or type(error).__name__


def for_templates(message: Message) -> dict[str, Any]:
    """Convert a message as transformers does before it renders a template.

    Null fields are omitted, because many templates render them as text. The reasoning is stored under both keys
    that templates read, `thinking` and `reasoning_content`.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    for name in REASONING:
        if name in fields:
            return {"thinking": fields[name], **fields, "reasoning_content": fields[name]}
    return fields
