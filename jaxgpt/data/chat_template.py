"""Render conversations with chat templates, and locate the text that the assistant wrote."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxgpt.errors import UserError, short_repr

RENDERED = 1 << 24  # maximum number of characters of a rendered conversation
ROLES = ("system", "user", "assistant", "tool", "developer", "ipython")
MARK = secrets.token_hex(16)  # delimiter of the assistant's text; random, so that no message contains it

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str  # input for the tokenizer, with the names of special tokens
    spans: list[tuple[int, int]]  # [begin, end) of the characters that the assistant wrote; empty if not located


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check and copy a conversation: a list of messages with `role` and `content`, as in chat APIs.

    Raises:
        UserError: if `messages` is empty or not a list, or a message has an unknown role, or no string as content and no calls.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError(
            f'messages must be a list such as [{{"role": "user", "content": "Hi"}}]: {short_repr(messages)}'
        )
    for number, message in enumerate(messages, 1):
        is_complete = isinstance(message, Mapping) and (
            isinstance(message.get("content"), str) or bool(message.get("tool_calls"))
        )
        if not is_complete:
            raise UserError(f"message {number} needs a role and a content that is a string: {short_repr(message)}")
        if message.get("role") not in ROLES:
            role = short_repr(message.get("role"))
            raise UserError(f"message {number} has the role {role}: use one of {', '.join(ROLES)}")
    return [dict(message) for message in messages]


class ChatTemplate:
    """A chat template, rendered as in transformers' `apply_chat_template`.

    A template is a program. It runs in Jinja's immutable sandbox, without access to files or to Python's internal attributes.
    Its output is limited to `RENDERED` characters, but its time and memory are unlimited. It is compiled on first use.

    Args:
        source: Jinja source.
        variables: variables of the template in addition to `messages`: `bos_token`, `eos_token`, ...
        date: date for templates that include it, such as `2024-07-26`; empty: today.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, date: str = "") -> None:
        self.source, self.variables, self.date = source, dict[str, Any](variables or {}), date

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: conversation, `[{"role": "user", "content": "Hi"}, ...]`.
            tools: descriptions of functions that the assistant can call.
            add_generation_prompt: end with the header of an assistant message.

        Raises:
            UserError: if the messages are malformed, or the template rejects them, fails, or renders too much text.
        """
        variables = self.variables | {"tools": tools, "documents": None, "messages": check_messages(messages)}
        marked = ""
        try:
            for part in self._template.generate(variables, add_generation_prompt=add_generation_prompt):
                marked += part
                if len(marked) > RENDERED:
                    raise ValueError(f"the result has more than {RENDERED:,} characters")
        except jinja2.TemplateSyntaxError as e:
            raise UserError(f"the chat template has an error: line {e.lineno}: {e.message}") from None
        except Exception as e:  # any exception of a template
            raise UserError(f"the chat template cannot render these messages: {str(e) or type(e).__name__}") from None
        text, spans = "", list[tuple[int, int]]()
        for number, part in enumerate(marked.split(MARK)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return Rendered(text, spans)

    def assistant_spans(self, messages: Sequence[Message], tools: Tools | None = None) -> Rendered:
        """Render a complete conversation, and locate the assistant's text, the targets of training.

        If the template has no `{% generation %}`, the text of an assistant message is the difference between two renderings,
        without trailing white space. One rendering ends with this message; the other has the earlier messages and the
        generation prompt.

        Raises:
            UserError: as in `render`; without `{% generation %}`: if the first message has the role assistant, or adding a
                message changes earlier text.
        """
        whole = self.render(messages, add_generation_prompt=False, tools=tools)
        if whole.spans:
            return whole
        if messages[0]["role"] == "assistant":
            raise UserError("the first message has the role assistant: begin with a user message")
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], tools=tools).text
            after = self.render(messages[: number + 1], add_generation_prompt=False, tools=tools).text
            if not after.startswith(before) or not whole.text.startswith(after.rstrip()):
                raise UserError(
                    f"the assistant's text in message {number + 1} cannot be located: the chat template changes earlier "
                    f"text when a message is added; use a template with {{% generation %}}"
                )
            spans.append((len(before), max(len(before), len(after.rstrip()))))  # empty span for an empty message
        return Rendered(whole.text, spans)

    @cached_property
    def _template(self) -> jinja2.Template:
        """The compiled template, with the tags, functions and filter that transformers provides."""
        extensions = [Generation, loopcontrols]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": self._strftime}
        return environment.from_string(self.source)

    def _strftime(self, form: str) -> str:
        return (datetime.fromisoformat(self.date) if self.date else datetime.now()).strftime(form)


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` encloses the text that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{MARK}{caller()}{MARK}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )  # without escapes of <, > and &, unlike Jinja's filter
