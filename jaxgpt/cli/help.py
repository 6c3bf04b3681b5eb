"""Describe the options of a command, from its dataclasses and their comments, as rows and as help text."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from jaxgpt.cli.options import Option, kind_of

WIDTH = 120  # maximum length of a line of help
INDENT = 26  # characters before the meaning of an option
KINDS = {int: "INT", float: "FLOAT", str: "STR", bool: ""}


class Row(NamedTuple):
    """An option.

    Attributes:
        flags: spellings of the option, separated by commas.
        kind: INT, FLOAT, STR or the choices; empty for a switch.
        default: as written on the command line; empty if it is empty, off or unset.
        meaning: the comment beside the field.
    """

    flags: str
    kind: str
    default: str
    meaning: str


class Group(NamedTuple):
    """A titled group of options."""

    title: str
    about: str
    rows: list[Row]


COMMON = [
    Row("-h, --help", "", "", "show this message and exit"),
    Row("--no-cache", "", "", "disable the cache of compiled programs"),
]


def groups(cls: type, default: Any = None) -> list[Group]:
    """Describe the options of a command.

    The fields of the dataclass itself are one group. Each base class and each section is another group.

    Args:
        cls: dataclass of the options.
        default: instance with the default values; None: the defaults of the fields.
    """
    default, hints = cls() if default is None else default, get_type_hints(cls)
    own: dict[str, Group] = {}
    sections = []
    for field in dataclasses.fields(cls):
        value, hint = getattr(default, field.name), hints[field.name]
        if is_dataclass(hint):
            about = inspect.cleandoc(hint.__doc__ or "").split("\n\n")[0]
            rows = [
                _row(inner, getattr(value, inner.name), type(value), field.name) for inner in dataclasses.fields(hint)
            ]
            sections.append(Group(f"{field.name} options", " ".join(about.split()), rows))
        else:
            title = _title(next(base for base in reversed(cls.__mro__) if field.name in _fields(base)), cls)
            own.setdefault(title, Group(title, "", [])).rows.append(_row(field, value, cls))
    own.setdefault("options", Group("options", "", [])).rows.extend(COMMON)
    return [*own.values(), *sections]


def help_text(cls: type, default: Any = None) -> str:
    """Format the options of a command for the width of the terminal."""
    lines = []
    for group in groups(cls, default):
        lines += ["", f"{group.title}:", *wrap(group.about, "  ")]
        for row in group.rows:
            head = "\n".join(wrap(f"{row.flags} {row.kind}".rstrip(), "  "))
            said = f"{row.meaning} (default:\xa0{row.default})" if row.default else row.meaning
            first, *rest = (line.replace("\xa0", " ") for line in wrap(said, " " * INDENT))
            fits = len(head) <= INDENT - 2
            lines += [f"{head:<{INDENT}}{first.lstrip()}" if fits else f"{head}\n{first}", *rest]
    return "\n".join(lines[1:])


def wrap(text: str, indent: str = "") -> list[str]:
    """Wrap a paragraph to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDTH)
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _row(field: Any, value: Any, cls: type, section: str = "") -> Row:
    hint = get_type_hints(cls)[field.name]
    option = Option(f"{section}.{field.name}" if section else field.name, kind_of(hint))
    off = (
        option.kind is bool and not value and not section
    )  # a switch that is off; its negative flag would have no effect
    flags = option.flag if off else ", ".join(option.flags)
    choices = get_args(option.kind) if get_origin(option.kind) is Literal else ()
    kind = f"{{{','.join(choices)}}}" if choices else KINDS[option.kind]
    several = " ..." if get_origin(hint) is tuple else ""
    meaning, default = comments(cls)[field.name], "" if off else _shown(value)
    if found := re.fullmatch(r"(.*) \(default: (.*)\)", meaning):
        meaning, default = found.groups()
    return Row(flags, kind + several, default, meaning)


def _shown(value: Any) -> str:
    """Format a default as on the command line; "" if it is empty or unset, which the meaning explains."""
    if value in ("", None, ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and value == value.strip() else repr(value)


def _title(base: type, cls: type) -> str:
    if base is cls:
        return "options"
    return f"{re.sub('^_|Params$|Args$', '', base.__name__).lower()} options"


def _fields(base: type) -> dict[str, Any]:
    return getattr(base, "__dataclass_fields__", {})


@lru_cache(maxsize=64)
def comments(cls: type) -> dict[str, str]:
    """Map each field of a dataclass to its help: that of a setting, or the comment beside or above the field."""
    declared = {field.name: field.metadata["help"] for field in dataclasses.fields(cls) if "help" in field.metadata}
    return {name: text for base in reversed(cls.__mro__) if _fields(base) for name, text in _comments(base)} | declared


def _comments(base: type) -> Iterator[tuple[str, str]]:
    above = ""
    for line in inspect.getsource(base).splitlines():
        if found := re.fullmatch(r"    (\w+): .*?(?:  # (.*))?", line):
            yield found[1], found[2] or above
        comment = re.fullmatch(r"    # (.*)", line)
        above = f"{above} {comment[1]}".strip() if comment else ""
