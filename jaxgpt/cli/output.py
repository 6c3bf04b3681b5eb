"""The result of a command: JSON, labelled lines, or text in columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

Facts = Mapping[str, str | Sequence[str]]  # lines of text, keyed by label; empty lines are not printed


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(dumps(value, allow_nan=False))


def finite_or_none(value: float) -> float | None:
    """Return a number, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def print_result(json: bool, values: dict[str, Any], text: str | Facts) -> int:
    """Print the result of a command as JSON, as text or as `aligned` facts; return the exit code 0."""
    if json:
        print_json(values)
    else:
        print(text if isinstance(text, str) else aligned(text))
    return 0


def aligned(facts: Facts) -> str:
    """Format labels and lines in two columns; skip empty lines."""
    rows = []
    width = max(map(len, facts), default=0)
    for label, value in facts.items():
        lines = [value] if isinstance(value, str) else value
        for number, line in enumerate(filter(None, lines)):
            rows.append(f"{'' if number else label:<{width}}  {line}")
    return "\n".join(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column is left-aligned, the other columns are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        cells[0] = f"{row[0]:<{widths[0]}}"
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
