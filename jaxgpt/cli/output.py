"""The results of commands as text: JSON, and facts and numbers in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

ERROR_OF_DATA = "+- is the standard error over windows of text, excluding variation between seeds"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(dumps(value, allow_nan=False))


def print_result(json: bool, values: dict[str, Any], text: str | Mapping[str, str | Sequence[str]]) -> int:
    """Print the result of a command as a JSON object, as text or as `aligned` facts; return 0."""
    if json:
        print_json(values)
    else:
        print(text if isinstance(text, str) else aligned(text))
    return 0


def aligned(facts: Mapping[str, str | Sequence[str]]) -> str:
    """Format labels and values in two columns, one line per value; skip empty values."""
    rows = []
    width = max(map(len, facts), default=0)
    for label, value in facts.items():
        lines = [value] if isinstance(value, str) else value
        for number, line in enumerate(filter(None, lines)):
            rows.append(f"{'' if number else label:<{width}}  {line}")
    return "\n".join(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column is left-aligned, the other columns are right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([f"{name:<{first}}", *padded]).rstrip())
    return "\n".join(lines)
