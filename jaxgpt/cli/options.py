"""Command-line options from dataclasses: one option per field, named `--section.field`, described by the field's comment."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import re
import shutil
import textwrap
import tokenize
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from jaxgpt.config import UserError, did_you_mean
from jaxgpt.strict import shown

T = TypeVar("T")

HELP = ("-h", "--help")
TRUTH = {"true": True, "false": False}
INDENT = 34  # column at which help texts begin


@dataclass(frozen=True)
class Option:
    """A field of a dataclass, as an option.

    Attributes:
        name: dotted path of the field, as in "train.batch_size".
        kind: type of a value: bool, int, float, str or a Literal.
        many: the option takes one value or more.
        default: value of the field; None: none to show.
        help: description.
        section: heading in the help text; empty for a command's own options.
    """

    name: str
    kind: Any
    many: bool
    default: Any
    help: str
    section: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def negative(self) -> str:
        """The flag that turns a bool off: `--train.no-scan-layers`."""
        section, dot, field = self.flag[2:].rpartition(".")
        return f"--{section}{dot}no-{field}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, self.negative) if self.kind is bool else (self.flag,)

    @property
    def metavar(self) -> str:
        """What a value looks like."""
        if get_origin(self.kind) is Literal:
            return "{" + ",".join(get_args(self.kind)) + "}"
        return {int: "INT", float: "FLOAT", str: "TEXT"}[self.kind] + (" ..." if self.many else "")


class CommandLine(NamedTuple):
    """A command line taken apart.

    Attributes:
        arguments: positional arguments.
        given: values of the options that were given, by dotted name.
        help: whether help was asked for.
    """

    arguments: list[str]
    given: dict[str, Any]
    help: bool


def options(cls: type, default: Any = None, section: str = "", title: str = "") -> list[Option]:
    """List the options of a dataclass and of the dataclasses within it.

    Args:
        cls: dataclass whose fields are bool, int, float, str, Literals of strings, tuples of these, or dataclasses.
        default: instance whose values are the defaults; None: the defaults of the fields.
        section: dotted prefix of the names.
        title: heading of the section.
    """
    hints, comments = get_type_hints(cls), _comments(cls)
    found: list[Option] = []
    nested: list[Option] = []
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], section + field.name
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(hint):
            assert isinstance(hint, type)
            about = inspect.getdoc(hint) or field.name
            nested += options(hint, value, f"{name}.", about.split(". ")[0].rstrip("."))
        else:
            kind, many = _kind(hint)
            found.append(Option(name, kind, many, value, comments.get(field.name, ""), title))
    return found + nested


def read(
    args: Sequence[str], known: Sequence[Option], unknown: Callable[[str], str], *, leading: bool = False
) -> CommandLine:
    """Take a command line apart.

    `--a_b` is `--a-b`, and `--name=value` is `--name value`. A value may begin with `-`, but one that looks like an option
    has to be written `--name=--value`. A flag takes `true` or `false` or nothing, and `--no-name` turns it off. Of options
    given twice the last one counts; the values of an option that takes several add up. `--` ends the options.
    Abbreviations are unknown options.

    Args:
        args: words of the command line.
        known: options to accept.
        unknown: the error message for another one.
        leading: stop at the first positional argument; it and all words after it are the arguments.

    Raises:
        UserError: an unknown option, a missing value, or a value of the wrong type.
    """
    table = {flag: option for option in known for flag in option.flags}
    line, words = CommandLine([], {}, False), deque(args)
    while words:
        word = words.popleft()
        if word == "--":
            break
        if word in HELP:
            line = line._replace(help=True)
            continue
        if not _is_option(word):
            if word.startswith("-") and len(word) > 1:
                raise UserError(unknown(word))
            line.arguments.append(word)
            if leading:
                break
            continue
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in table:
            raise UserError(unknown(flag))
        option = table[flag]
        if option.kind is bool:
            if not equals:
                text = words.popleft() if words and words[0].lower() in TRUTH else "true"
            line.given[option.name] = _truth(flag, text) == (flag == option.flag)
            continue
        if not equals:
            if not words or words[0] == "--" or _is_option(words[0]):
                hint = f" (if {words[0]} is the value: {flag}={words[0]})" if words and words[0] not in HELP else ""
                raise UserError(f"{flag} needs a value: {flag} {option.metavar}{hint}")
            text = words.popleft()
        if not option.many:
            line.given[option.name] = _convert(option, text)
            continue
        texts = [text]
        while not equals and words and words[0] != "--" and not _is_option(words[0]):
            texts.append(words.popleft())
        values = tuple(_convert(option, text) for text in texts)
        line.given[option.name] = line.given.get(option.name, ()) + values
    line.arguments.extend(words)
    return line


def build(cls: type[T], given: Mapping[str, Any], default: T | None = None, section: str = "") -> T:
    """Make a dataclass from the options that were given.

    Args:
        cls: the dataclass.
        given: values by dotted name.
        default: instance to take all other values from; None: the defaults of the fields.
        section: dotted prefix of the names of its fields.

    Raises:
        UserError: from the checks of the dataclasses.
    """
    hints, changes = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, hint = section + field.name, hints[field.name]
        if is_dataclass(hint):
            if any(other.startswith(f"{name}.") for other in given):
                inner = _default(field) if default is None else getattr(default, field.name)
                changes[field.name] = build(hint, given, inner, f"{name}.")  # type: ignore[arg-type]
        elif name in given:
            changes[field.name] = given[name]
    return cls(**changes) if default is None else dataclasses.replace(default, **changes)  # type: ignore[type-var]


def help_text(known: Iterable[Option]) -> str:
    """Describe options in lines, under the headings of their sections."""
    lines, section = ["options:", f"  {', '.join(HELP):{INDENT - 2}}show this help and exit"], ""
    width = max(shutil.get_terminal_size().columns, 60) - INDENT
    for option in known:
        if option.section != section:
            section = option.section
            lines += ["", f"{section}:"]
        left = "  " + ", ".join(option.flags) + ("" if option.kind is bool else f" {option.metavar}")
        default = _shown_default(option.default)
        text = option.help + (f" (default: {default})" if default else "")
        if len(left) > INDENT - 2:
            lines.append(left)
            left = ""
        for part in textwrap.wrap(text, width, break_on_hyphens=False):
            lines.append(f"{left:{INDENT}}{part}")
            left = ""
    return "\n".join(lines)


def _is_option(word: str) -> bool:
    """Whether a word reads as an option. `-1`, `- item` and `-- remark` are values."""
    return word in HELP or re.fullmatch(r"--[A-Za-z][^\s=]*(=.*)?", word, re.DOTALL) is not None


def _truth(flag: str, text: str) -> bool:
    if text.lower() not in TRUTH:
        raise UserError(f"{flag} takes true, false or no value, not {shown(text)}")
    return TRUTH[text.lower()]


def _convert(option: Option, text: str) -> Any:
    flag, kind = option.flag, option.kind
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if text not in choices:
            near = did_you_mean(text, choices)
            raise UserError(f"{flag} cannot be {shown(text)}{near}: choose one of {', '.join(choices)}")
        return text
    try:
        return kind(text)
    except ValueError:
        expected = {int: "an integer", float: "a number"}[kind]
        raise UserError(f"{flag} must be {expected}, not {shown(text)}") from None


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there can be several."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    if NoneType in get_args(hint):
        [kind] = (kind for kind in get_args(hint) if kind is not NoneType)
        return kind, False
    return hint, False


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _shown_default(value: Any) -> str:
    """A default as one would type it; empty where the help text says all there is to say."""
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not value.isprintable():
        return repr(value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Comments of a dataclass's fields: those before a field, on lines of their own, and the one behind it."""
    found: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        if not is_dataclass(klass):
            continue
        source = textwrap.dedent(inspect.getsource(klass))
        remarks = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        end = 0
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = [remarks[n] for n in range(end + 1, (node.end_lineno or node.lineno) + 1) if n in remarks]
                found[node.target.id] = " ".join(lines)
            end = node.end_lineno or node.lineno
    return found
