"""Forms of the content of messages that a chat template reads: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jaxgpt.data.chat.probes import CONTEXTS, Render
from jaxgpt.errors import UserError

PROBE = "Zq7probe"  # content of a message in short conversations


class ContentForms:
    """Converts the content of messages to the form that a template reads.

    A string becomes a list of one part if the template reads only lists of parts. A list of text parts becomes its
    concatenation if the template reads only strings. Without these changes, the template would fail, omit the text, or
    print the fields of the parts.

    Args:
        render: renders messages and tools with the template.
    """

    def __init__(self, render: Render) -> None:
        self._render = render

    def readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its content in the form that the template reads.

        A list with parts other than texts is unchanged.
        """
        content = message.get("content")
        if isinstance(content, str) and not self._reads_text and self._reads_parts:
            return message | {"content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self._reads_parts and self._reads_text:
            texts = [part["text"] for part in content if _is_text(part)]
            if len(texts) == len(content):
                return message | {"content": "".join(texts)}
        return message

    @cached_property
    def _reads_text(self) -> bool:
        return self._reads(PROBE)

    @cached_property
    def _reads_parts(self) -> bool:
        return self._reads([{"type": "text", "text": PROBE}])

    def _reads(self, content: Any) -> bool:
        """Return whether the template renders the text of `content`, and not the field names of its parts.

        The first context that the template accepts decides.
        """
        question = {"role": "user", "content": content}
        for context in CONTEXTS:
            before = [message | {"content": content} for message in context.before]
            try:
                text = self._render([*before, question], context.tools)
            except UserError:
                continue
            prints_fields = "'text'" in text or '"text"' in text
            return PROBE in text and not prints_fields
        return False


def _is_text(part: Any) -> bool:
    """Return whether a part of a content has a text, unlike images."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
