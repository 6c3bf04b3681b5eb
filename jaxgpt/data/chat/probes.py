"""Short conversations that show which forms of messages a chat template reads, and what it adds to them.

A template is a program, so its properties are found by rendering. The messages contain words that begin with Zq7, which
occur in no template, so that a rendering shows where each message is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PROBED = 1 << 18  # maximum number of characters of a rendered short conversation

# Function that returns the template's text of messages and tools, and raises `UserError` if the template fails.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str]


class Context(NamedTuple):
    """Messages before a question, and the tools of the conversation; None: no tools."""

    before: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


SYSTEM = {"role": "system", "content": "Zq7system"}
FUNCTION = {"name": "Zq7function", "description": "Zq7", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
# The contexts in the order of trial: some templates need a system message or tools.
CONTEXTS = (
    Context([], None),
    Context([SYSTEM], None),
    Context([], [TOOL]),
    Context([SYSTEM], [TOOL]),
)
