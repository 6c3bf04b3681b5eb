"""Rewards by name: built-in functions, or a function in a user's Python file.

A function in a file is the user's own code. It runs only if its file is named on the command line (`--post.reward`).
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.reward_words import ANSWER, is_own_code
from jaxgpt.suggestions import did_you_mean

# A reward maps (prompts, texts, records) to a number per text. A prompt is a text or a list of messages, as in its record.
Reward = Callable[[Sequence[Any], Sequence[str], Sequence[Mapping[str, Any]]], Sequence[float]]

MINUS = str.maketrans(dict.fromkeys("\u2212\u2013", "-"))  # the minus sign and the en dash of typeset texts
# Separators of groups of three digits other than a comma: in LaTeX, such as 10{,}000, 10,\!000 and 10\,000, and thin spaces.
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|[\u2009\u202f])(?=\d{3}(?!\d))")
# A sign after a letter, digit or closing bracket is not part of the number, as in "10-7" and "covid-19". Commas are accepted
# only between groups of three digits.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,6})?"
)
BUILT_IN = "exact[:FIELD], number[:FIELD], regex:PATTERN or json"


def open_reward(name: str) -> Reward:
    """Return the reward with a name: a built-in reward, or a function in a Python file, which is run.

    Raises:
        UserError: if the name is unknown, or the file is missing, raises an error, or lacks the function.
    """
    if is_own_code(name):
        path, _, function = name.rpartition(":")
        return _load(Path(path), function)
    kind, _, argument = name.partition(":")
    if kind == "exact":
        return _exact(argument or ANSWER)
    if kind == "number":
        return _number(argument or ANSWER)
    if kind == "json" and not argument:
        return _is_json
    if kind == "regex" and argument:
        return _matches(argument)
    near = did_you_mean(kind, ("exact", "number", "regex", "json"))
    if name.endswith(".py"):
        raise UserError(f"post.reward {name} names no function: use {name}:FUNCTION")
    single = ""
    if re.search(r"=-?[\d.]+$", name):
        single = "; a single reward has no weight"
    raise UserError(f"post.reward {short_repr(name)} is unknown{near}: use {BUILT_IN}, or FILE.py:FUNCTION{single}")


def check_file(name: str) -> None:
    """Raise `UserError` if the file of a function, `FILE.py:FUNCTION`, is missing."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"post.reward: {path} does not exist: write a file with the function {function}")


def _load(path: Path, function: str) -> Reward:
    check_file(f"{path}:{function}")
    try:
        found = runpy.run_path(str(path)).get(function)
    except (Exception, SystemExit) as e:
        raise UserError(f"post.reward: {path} raises {type(e).__name__}: {one_line(e, 200)}; correct the file") from e
    if not callable(found):
        raise UserError(f"post.reward: {path} has no function {function}: define it")
    return found  # type: ignore[no-any-return]


def _expected(record: Mapping[str, Any], field: str) -> str:
    if field not in record:
        raise UserError(
            f"no field {field!r} with the expected answer: the fields are {short_repr([*record])}; add it, or choose a field, "
            f"as in exact:FIELD"
        )
    value = record[field]
    if isinstance(value, (bool, list, dict, bytes)):
        raise UserError(f"the field {field!r} with the expected answer must be a text or a number: {short_repr(value)}")
    return str(value)


def _exact(field: str) -> Reward:
    """Return a reward: 1 if a text equals the field of its record, without white space at the ends; otherwise 0.

    In tables, a column of integers with missing values has 4.0 instead of 4, so both spellings are accepted.
    """

    def one(text: str, record: Mapping[str, Any]) -> float:
        accepted = [_expected(record, field).strip()]
        value = record[field]
        if isinstance(value, float) and value.is_integer():
            accepted.append(str(int(value)))
        return float(text.strip() in accepted)

    def reward(prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        return [one(text, record) for text, record in zip(texts, records, strict=True)]

    return reward


def last_number(text: str) -> Decimal | None:
    """Return the exact last number in a text; None: no number."""
    with_commas = SEPARATOR.sub(",", text.translate(MINUS))
    found = NUMBER.findall(with_commas)
    return Decimal(found[-1].replace(",", "")) if found else None


def _number(field: str) -> Reward:
    """Return a reward: 1 if the last number of a text equals the last number in the field of its record; otherwise 0."""

    def one(text: str, record: Mapping[str, Any]) -> float:
        expected = last_number(_expected(record, field))
        if expected is None:
            raise UserError(
                f"the field {field!r} has no number: {short_repr(record[field])}; correct the record, or use exact:FIELD"
            )
        return float(last_number(text) == expected)

    def reward(prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        return [one(text, record) for text, record in zip(texts, records, strict=True)]

    return reward


def _matches(pattern: str) -> Reward:
    """Return a reward: 1 if a text contains a match of a pattern; otherwise 0."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise UserError(f"post.reward: regex {short_repr(pattern)} is not a regular expression: {e}") from None

    def reward(prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float(compiled.search(text) is not None) for text in texts]

    return reward


def _is_json(prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return 1 for each text that is valid JSON; otherwise 0."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def one(text: str) -> float:
        try:
            json.loads(text, parse_constant=refuse)  # rejects NaN and Infinity, which `json.loads` accepts by default
        except (ValueError, RecursionError):
            return 0.0
        return 1.0

    return [one(text) for text in texts]
