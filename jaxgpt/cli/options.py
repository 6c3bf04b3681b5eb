"""Command-line options from dataclasses, with tyro: one option per field, named `--section.field`; its comment is the help."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from jaxgpt.config import UserError, did_you_mean
from jaxgpt.errors import short_repr

T = TypeVar("T")

HELP = ("-h", "--help")
TRUTH = {"true": True, "false": False}
ARGUMENTS = "arguments"  # name of the field for positional arguments in the class that tyro parses


@dataclass(frozen=True)
class Option:
    """A command-line option, made from a field of a dataclass.

    Attributes:
        name: dotted path of the field, as in "train.batch_size".
        kind: type of a value: bool, int, float, str or a Literal.
    """

    name: str
    kind: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def negative(self) -> str:
        """The flag that sets a bool to false, such as `--train.no-scan-layers`."""
        section, dot, field = self.flag[2:].rpartition(".")
        return f"--{section}{dot}no-{field}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, self.negative) if self.kind is bool else (self.flag,)


def options(cls: type, section: str = "") -> list[Option]:
    """List the options of a dataclass and of the dataclasses within it."""
    found: list[Option] = []
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            found += options(hint, f"{section}{name}.")  # type: ignore[arg-type]
        else:
            found.append(Option(section + name, kind_of(hint)))
    return found


def read(cls: type, args: Sequence[str], unknown: Callable[[str], str]) -> tuple[list[str], dict[str, Any]]:
    """Parse a command line.

    `--a_b` means `--a-b`, `--name=value` means `--name value`, and `--flag false` means `--no-flag`. If an option is given
    twice, the last value is used. `--` ends the options. Abbreviations are not accepted.

    Args:
        cls: dataclass of the options.
        args: command-line arguments, without -h or --help.
        unknown: returns the error message for an unknown option.

    Returns:
        The positional arguments, and the values of the options that were given, by dotted name.

    Raises:
        UserError: an unknown option, a missing value, or a value of the wrong type.
    """
    import tyro

    table = {flag: option for option in options(cls) for flag in option.flags}
    words: list[str] = []
    given: list[str] = []
    ahead = iter(enumerate(args))
    for place, word in ahead:
        if word == "--":
            words += args[place:]
            break
        if re.fullmatch(r"--[A-Za-z][^\s=]*(=.*)?", word, re.DOTALL):
            flag, equals, value = word.partition("=")
            option = table.get(flag := flag.replace("_", "-"))
            if option is None:
                raise UserError(unknown(flag))
            given.append(option.name)
            if option.kind is bool and not equals and "".join(args[place + 1 : place + 2]).lower() in TRUTH:
                equals, (_, value) = "=", next(ahead)
            word = _switch(option, flag, value) if equals and option.kind is bool else flag + equals + value
        words.append(word)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed, rest = tyro.cli(_unchecked(cls, True), args=words, return_unknown_args=True, add_help=False)
    except SystemExit:
        raise UserError(_plain(errors.getvalue(), table)) from None
    if rest and rest[0].startswith("-"):
        raise UserError(unknown(rest[0]))
    values = {name: _value(parsed, name) for name in given}
    return [*getattr(parsed, ARGUMENTS), *rest], values


def build(cls: type[T], given: Mapping[str, Any], default: T | None = None, section: str = "") -> T:
    """Build a dataclass from the given options.

    Args:
        cls: the dataclass.
        given: values by dotted name.
        default: instance that provides all other values; None: the defaults of the fields.
        section: dotted prefix of the field names.

    Raises:
        UserError: a check of one of the dataclasses failed.
    """
    hints, changes = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, hint = section + field.name, hints[field.name]
        if is_dataclass(hint):
            if any(other.startswith(f"{name}.") for other in given):
                inner = hint() if default is None else getattr(default, field.name)  # type: ignore[operator]
                changes[field.name] = build(hint, given, inner, f"{name}.")  # type: ignore[arg-type]
        elif name in given:
            changes[field.name] = given[name]
    return cls(**changes) if default is None else dataclasses.replace(default, **changes)  # type: ignore[type-var]


def _unchecked(cls: type, outermost: bool = False) -> Any:
    """Copy a dataclass without its checks: the given options may be valid only in combination with a preset."""
    import tyro

    hints, made = get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            inner = _unchecked(hint)  # type: ignore[arg-type]
            made.append((field.name, inner, dataclasses.field(default_factory=inner)))
        else:
            made.append((field.name, hint, dataclasses.field(default=field.default)))
    if outermost:
        positional = tyro.conf.Positional[tuple[str, ...]]
        made.append((ARGUMENTS, positional, dataclasses.field(default=())))
    return dataclasses.make_dataclass(cls.__name__, made)


def _switch(option: Option, flag: str, value: str) -> str:
    if value.lower() not in TRUTH:
        raise UserError(f"{flag} takes true, false or no value, not {short_repr(value)}")
    return option.flag if TRUTH[value.lower()] == (flag == option.flag) else option.negative


def _value(parsed: Any, name: str) -> Any:
    for part in name.split("."):
        parsed = getattr(parsed, part)
    return parsed


def _plain(box: str, table: Mapping[str, Option]) -> str:
    """Convert tyro's error message, which is drawn in a box, to one line."""
    lines = [re.sub(r"[│╭╮╰╯─]+", " ", line).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line and not line.startswith("For full helptext"))
    if found := re.search(r"Missing value for argument '(--[\w.-]+)", text):
        return f"{found[1]} needs a value (if the value begins with a hyphen: {found[1]}=VALUE)"
    if found := re.search(r"invalid choice '(.*?)' for argument '(--[\w.-]+)", text):
        choices = get_args(table[found[2]].kind)
        near = did_you_mean(found[1], choices)
        return f"{found[2]} must be one of {', '.join(choices)}, not {short_repr(found[1])}{near}"
    if found := re.search(r"Error parsing (--[\w.-]+)", text):
        expected = {int: "an integer", float: "a number"}.get(table[found[1]].kind, "another value")
        [values] = re.findall(r"\[('.*?')\]|('.*?')", text)[:1] or [("", "")]
        value = " ".join(re.findall("'(.*?)'", "".join(values)))
        return f"{found[1]} must be {expected}, not {short_repr(value)}"
    return text


def kind_of(hint: Any) -> Any:
    """Return the type of a single value of an option."""
    if get_origin(hint) is tuple or NoneType in get_args(hint):
        return next(kind for kind in get_args(hint) if kind is not NoneType)
    return hint
