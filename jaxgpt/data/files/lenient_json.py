"""Lenient JSON: accepts NaN, huge numbers, unpaired surrogates and duplicate keys, for example in unused fields of a record."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from jaxgpt.errors import UserError, short_repr

DIGITS = 4000  # longer integers, with sign, are read as floats; Python's limit is 4,300 digits


class Twice:
    """The value of a duplicate key of an object: code that reads the key rejects this type, and a template cannot print it."""

    def __repr__(self) -> str:
        return "(a key that is given twice)"

    def __str__(self) -> str:
        raise ValueError("a key is given twice")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its keys and values; the value of a duplicate key is `Twice`."""
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        value |= {name: Twice() for name in value if counts[name] > 1}
    return value


def _integer(digits: str) -> int | float:
    """Parse an integer; with too many digits for an `int`, as a `float`, which may be infinite."""
    return int(digits) if len(digits) <= DIGITS else float(digits)


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)


def decode(text: bytes | str) -> Any:
    """Parse JSON leniently.

    Raises:
        ValueError: if the text is not JSON, or not UTF-8.
        RecursionError: if the text is nested too deeply.
    """
    return DECODER.decode(text.decode("utf-8") if isinstance(text, bytes) else text)


def not_json(e: ValueError | RecursionError) -> str:
    """Describe an error of `decode`."""
    reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
    return f"not valid JSON ({reason})"


def parse_record(text: bytes | str, where: str) -> Any:
    """Parse the JSON of a record; raise a `UserError` that begins with `where` for invalid JSON or UTF-8."""
    try:
        return decode(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: {not_json(e)}") from None


def parse_field(value: Any, what: str) -> Any:
    """Parse JSON that a field stores as a string; return other values unchanged.

    Args:
        value: value of the field.
        what: the field, for errors.

    Raises:
        UserError: if the string is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return decode(value)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{what} is a string, but {not_json(e)}: {short_repr(value)}") from None


def repeats_key(value: Any) -> bool:
    """Return whether an object in a JSON value has a key twice."""
    if isinstance(value, dict):
        return any(map(repeats_key, value.values()))
    if isinstance(value, list):
        return any(map(repeats_key, value))
    return isinstance(value, Twice)
