"""The Jinja environment of chat templates: a sandbox with the tags, functions and filter that transformers provides."""

from __future__ import annotations

import json
import re
import secrets
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

MARK = secrets.token_hex(16)  # delimiter of the assistant's text; random, so that no message contains it


def sandbox(date: str) -> ImmutableSandboxedEnvironment:
    """Return an environment with the tags, functions and filter that transformers provides.

    Args:
        date: date of `strftime_now`, such as `2024-07-26`; empty: today.
    """
    fixed = datetime.fromisoformat(date) if date else None

    def strftime_now(form: str) -> str:
        now = datetime.now() if fixed is None else fixed
        return now.strftime(form)

    extensions = [GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=UndefinedToken
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": strftime_now, "namespace": PublicNamespace}
    return environment


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` encloses the text that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Parse the tag and its body to a call of `mark`, which receives the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        """Render the body between two marks."""
        return f"{MARK}{caller()}{MARK}"


class PublicNamespace(Namespace):
    """Jinja's `namespace`; its attributes must not begin with an underscore, as in transformers."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` is in `args`: it may be the name of an attribute
        values = dict(*args[1:], **attributes)
        for name in values:
            _check_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class UndefinedToken(jinja2.Undefined):
    """An undefined variable: a template may test whether it exists, but not print it if its name ends in `_token`.

    Jinja prints undefined variables as empty text, so conversations would lose the ends of their turns without notice.
    """

    def __str__(self) -> str:
        """Return "", as Jinja does; raise `UndefinedError` for the name of a token."""
        name = str(self._undefined_name)
        is_variable = self._undefined_obj is missing
        if is_variable and name.endswith("_token"):
            raise jinja2.UndefinedError(
                f"it prints {name}, which is not a token of the tokenizer; add {name} to tokenizer_config.json, with null "
                f"as its value for no text"
            )
        return super().__str__()


def _check_public(name: Any) -> None:
    """Raise `SecurityError` for an attribute that begins with an underscore."""
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: rename it without the underscore")


def _raise(message: str) -> None:
    """Raise an error with the message of a template, which calls this function as `raise_exception`."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without escapes of <, > and &, unlike Jinja's filter, and without escapes of noncharacters.

    Noncharacters mark names of control tokens in messages (`tokenizers.marks`).
    """
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return re.sub(r"\\(?:u([0-9a-f]{4})|.)", _unescape_noncharacter, text)


def _unescape_noncharacter(escape: re.Match[str]) -> str:
    """Return the character of an escaped noncharacter; return other escapes unchanged."""
    digits = escape[1]
    if digits is None:  # an escape such as \n
        return escape[0]
    code = int(digits, 16)
    return chr(code) if 0xFDD0 <= code <= 0xFDEF else escape[0]
