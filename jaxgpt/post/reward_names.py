"""Rewards by name: built-in functions, or a function in a user's Python file.

A function in a file is the user's own code. It runs only if its file is named on the command line (`--post.reward`).
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from jaxgpt.data.prompts import expected_answer
from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.reward_words import ANSWER, is_own_code
from jaxgpt.suggestions import did_you_mean

# A reward maps (prompts, texts, records) to a number per text. A prompt is a text or a list of messages, as in its record.
Reward = Callable[[Sequence[Any], Sequence[str], Sequence[Mapping[str, Any]]], Sequence[float]]

MINUS = str.maketrans(dict.fromkeys("\u2212\u2013", "-"))  # hyphen for the minus sign and the en dash of typeset texts
# Separators of groups of three digits other than a comma: in LaTeX, such as 10{,}000, 10,\!000 and 10\,000, and thin spaces.
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|[\u2009\u202f])(?=\d{3}(?!\d))")
NUMBER = re.compile(
    r"""
    (?: (?<![\w)\]]) [-+] )?         # a sign, except after a letter, digit or closing bracket, as in 10-7 and covid-19
    (?: \d{1,3} (?:,\d{3})+ (?!\d)   # groups of three digits between commas
      | \d+
      | (?<!\d) (?=\.\d)             # no digit before the decimal point
    )
    (?: \.\d+ )?
    (?: [eE] [-+]? \d{1,6} )?
    """,
    re.VERBOSE,
)
FORMS = {
    "exact": "exact[:FIELD]",
    "number": "number[:FIELD]",
    "regex": "regex:PATTERN",
    "json": "json",
}  # forms of the names of built-in rewards, keyed by kind

Score = Callable[[str, Mapping[str, Any]], float]  # maps a text and the record of its prompt to a number


def open_reward(name: str) -> Reward:
    """Return the reward with a name: a built-in reward, or a function in a Python file, which is run.

    Raises:
        UserError: if the name is unknown, its regular expression is invalid, or the file is missing, raises an error, or lacks
            the function.
    """
    if is_own_code(name):
        path, _, function = name.rpartition(":")
        return _load(Path(path), function)
    score = _built_in(name)
    if score is None:
        raise _unknown(name)

    def reward(prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        return [score(text, record) for text, record in zip(texts, records, strict=True)]

    return reward


def _built_in(name: str) -> Score | None:
    """Return the built-in reward with a name; None: the name is in no form of `FORMS`."""
    kind, _, argument = name.partition(":")
    if kind == "exact":
        return partial(_exact, name, argument or ANSWER)
    if kind == "number":
        return partial(_number, name, argument or ANSWER)
    if kind == "regex" and argument:
        return _matches(argument)
    if kind == "json" and not argument:
        return _is_json
    return None


def _unknown(name: str) -> UserError:
    """Return the error for a name that is neither a built-in reward nor a function in a file."""
    if name.endswith(".py"):
        return UserError(f"post.reward {name} names no function: use {name}:FUNCTION")
    kind, _, _ = name.partition(":")
    *first, last = FORMS.values()
    fix = f"use {', '.join(first)} or {last}, or FILE.py:FUNCTION"
    if re.search(r"=-?[\d.]+$", name):
        fix = f"{fix}; a single reward has no weight"
    return UserError(f"post.reward {short_repr(name)} is unknown{did_you_mean(kind, FORMS)}: {fix}")


def check_file(name: str) -> None:
    """Raise `UserError` if the file of a function, `FILE.py:FUNCTION`, is missing."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"post.reward: {path} does not exist: write a file with the function {function}")


def _load(path: Path, function: str) -> Reward:
    """Run a Python file, and return its function; raise `UserError` if the file is missing or fails."""
    check_file(f"{path}:{function}")
    try:
        found = runpy.run_path(str(path)).get(function)
    except (Exception, SystemExit) as e:
        raise UserError(f"post.reward: {path} raises {type(e).__name__}: {one_line(e, 200)}; correct the file") from e
    if not callable(found):
        raise UserError(f"post.reward: {path} has no function {function}: define it")
    return found  # type: ignore[no-any-return]


def _exact(name: str, field: str, text: str, record: Mapping[str, Any]) -> float:
    """Return 1 if a text equals the expected answer, without white space at the ends; otherwise 0.

    In tables, a column of integers with missing values has 4.0 instead of 4, so both spellings are accepted.
    """
    accepted = [expected_answer(record, name, field).strip()]
    value = record[field]
    if isinstance(value, float) and value.is_integer():
        accepted.append(str(int(value)))
    return float(text.strip() in accepted)


def _number(name: str, field: str, text: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the last number of a text equals the last number of the expected answer; otherwise 0."""
    expected = last_number(expected_answer(record, name, field))
    if expected is None:
        raise UserError(
            f"the field {field!r} has no number: {short_repr(record[field])}; correct the record, or use exact:FIELD"
        )
    return float(last_number(text) == expected)


def last_number(text: str) -> Decimal | None:
    """Return the exact last number in a text; None: no number."""
    with_commas = SEPARATOR.sub(",", text.translate(MINUS))
    found = NUMBER.findall(with_commas)
    return Decimal(found[-1].replace(",", "")) if found else None


def _matches(pattern: str) -> Score:
    """Return a reward: 1 if a text contains a match of a pattern; otherwise 0."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise UserError(f"post.reward: regex {short_repr(pattern)} is not a regular expression: {e}") from None
    return lambda text, _: float(compiled.search(text) is not None)


def _is_json(text: str, _: Mapping[str, Any]) -> float:
    """Return 1 if a text is valid JSON; otherwise 0."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)  # rejects NaN and Infinity, which `json.loads` accepts by default
    except (ValueError, RecursionError):
        return 0.0
    return 1.0
