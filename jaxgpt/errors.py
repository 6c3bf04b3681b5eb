"""Errors that a command reports in one line, and strict parsing of untrusted input: numbers, JSON and files.

This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
import reprlib
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

JSON_LIMIT = 1 << 24  # bytes of a JSON file; 16 MB is 100 times the index of the largest published models
_LONGEST = 1000  # maximum length of an error message
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


class TrainingFailed(RuntimeError):
    """The run failed although its input was valid. The command line prints the message in one line and exits with 1."""


class UserError(ValueError):
    """An error that the user can fix. The command line prints the message in one line and exits with 2.

    The message states the problem, the value and the fix. Control characters in it are escaped and a long one is cut in the
    middle, so that it is one line whatever names and values it contains.
    """

    def __init__(self, message: str) -> None:
        line = _BREAKS.sub(lambda found: repr(found[0])[1:-1], message)
        cut = len(line) - _LONGEST
        super().__init__(line if cut <= 0 else f"{line[: _LONGEST // 2]} ... {line[_LONGEST // 2 + cut :]}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean X?)"`, or an empty string if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7) if len(word) < 100 else []
    return f" (did you mean {near[0]}?)" if near else ""


def shown(value: Any) -> str:
    """Format a value for an error message: its repr, shortened if it is long or deeply nested."""
    return _short.repr(value)


def as_int(name: str, value: Any, low: int, high: int) -> int:
    """Convert an integer of any kind (Python's, NumPy's, a 0-d array) to `int`.

    Raises:
        UserError: not an integer (a bool and a float are not), or outside `low` to `high`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise UserError(f"{name} must be an integer: {shown(value)}")
    if not low <= number <= high:
        limit = f"at least {low:,}" if number < low else f"at most {high:,}"
        raise UserError(f"{name} must be {limit}: {shown(number)}")
    return number


def as_float(
    name: str, value: Any, low: float, high: float, *, open_start: bool = False, open_end: bool = False
) -> float:
    """Convert a real number of any kind (Python's, NumPy's, a 0-d array) to `float`.

    Raises:
        UserError: not a real number (a bool is not), NaN, or outside `low` to `high`.
    """
    real = isinstance(value, Real) or (getattr(value, "shape", None) == () and value.dtype.kind in "iuf")
    if not real or isinstance(value, bool):
        raise UserError(f"{name} must be a number: {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # Written so that NaN fails the check.
    if not (low <= number <= high) or (open_start and number == low) or (open_end and number == high):
        start = "above" if open_start else "at least"
        end = "" if high == math.inf else f" and {'below' if open_end else 'at most'} {high:g}"
        raise UserError(f"{name} must be {start} {low:g}{end or ' and finite' * open_end}: {shown(value)}")
    return number


def parse_json(data: bytes | str, where: str, huge: bool = False) -> Any:
    """Parse JSON strictly.

    Rejects what JSON parsers disagree on and what Python's parser would change: duplicate keys, NaN and Infinity, integers
    beyond 64 bits, numbers beyond float64, lone surrogates, a byte-order mark, and nesting deeper than Python's stack.

    Args:
        data: the text.
        where: its path, for errors.
        huge: accept integers beyond 64 bits, as floats.

    Raises:
        UserError: invalid JSON, or any of the above.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_huge if huge else _whole,
            parse_float=_real,
            parse_constant=_no_constant,
        )
        if _HALVES.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where}: not valid JSON (nested too deeply)") from None
    except json.JSONDecodeError as e:
        place = f"line {e.lineno} column {e.colno}" if "\n" in text else f"column {e.colno}"
        raise UserError(f"{where}: not valid JSON ({e.msg}: {place})") from None
    except ValueError as e:
        raise UserError(f"{where}: not valid JSON ({e})") from None
    return value


def read_json(path: Path, huge: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: the file.
        huge: accept integers beyond 64 bits, as floats.

    Raises:
        UserError: the file is missing, too large, or not a JSON object.
    """
    value = parse_json(read_bytes(path), str(path), huge)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def read_bytes(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """Read a file of at most `limit` bytes.

    Raises:
        UserError: the file is missing, not a regular file (a pipe would never end), or too large.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read {path}: it is not a file")
        size = path.stat().st_size
        if size > limit:
            raise UserError(f"{path} is too large: {size:,} bytes, at most {limit:,} are allowed")
        return path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is given twice")
    return value


def _whole(digits: str) -> int:
    # 64-bit integers have at most 20 characters, sign included; int() would accept any length.
    value = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the number {shown(digits)} is beyond 64 bits")
    return value


def _huge(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else _real(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {shown(digits)} is beyond float64")
    return value


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")
