"""The output of commands: facts and JSON on standard output, notes on standard error."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ERROR_OF_DATA = "+- is the standard error over windows of text; runs with different seeds also differ"


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(value, allow_nan=False))


def print_facts(facts: Mapping[str, str | Sequence[str]]) -> None:
    """Print `aligned(facts)`."""
    print(aligned(facts))


def aligned(facts: Mapping[str, str | Sequence[str]]) -> str:
    """Format labels and values in two columns; a list of values takes one line each. Empty values are skipped."""
    rows = []
    width = max(map(len, facts), default=0)
    for label, value in facts.items():
        lines = [value] if isinstance(value, str) else value
        for number, line in enumerate(filter(None, lines)):
            rows.append(f"{'' if number else label:<{width}}  {line}")
    return "\n".join(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column is aligned left, the others right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([f"{name:<{first}}", *padded]).rstrip())
    return "\n".join(lines)


def note(text: str) -> None:
    """Print a line on standard error, which keeps it out of machine-readable output."""
    try:
        print(f"jaxgpt: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:  # the reader closed the pipe, as in `jaxgpt train 2>&1 | head`; keep working
        discard(sys.stderr.fileno())


def discard(descriptor: int) -> None:
    """Redirect a stream to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def command_line(*words: str) -> str:
    """Quote a jaxgpt command for a shell."""
    return shlex.join(["jaxgpt", *words])


def path_word(path: Path) -> str:
    """Write a path so that it is not parsed as an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)
