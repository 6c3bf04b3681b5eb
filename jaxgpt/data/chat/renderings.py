"""Renderings of a conversation: the texts that a chat template renders from its first messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxgpt.data.chat.template import ChatTemplate, Rendered


class Renderings:
    """A conversation, and the texts that a template renders from its first messages, each rendered once.

    Args:
        template: chat template.
        messages: messages of the conversation.
        tools: descriptions of functions; None: no tools.
        header: text that chat sends between the messages and an answer, in addition to the text of the template.
        is_prompt: whether the conversation is a prompt, which chat sends for an answer; false: a complete conversation.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        header: str,
        is_prompt: bool,
    ) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.header = header
        self.is_prompt = is_prompt
        self._rendered = dict[tuple[int, bool], Rendered]()  # keyed by number of messages and is_prompt

    def replaced(self, messages: list[dict[str, Any]], tools: Any) -> Renderings:
        """Return the renderings of different messages and tools."""
        return Renderings(self.template, messages, tools, self.header, self.is_prompt)

    def since(self, n: int) -> Renderings:
        """Return the renderings of the conversation without the first n messages."""
        return self.replaced(self.messages[n:], self.tools)

    def answers(self, first: int = 1) -> Iterator[int]:
        """Yield the indices of the assistant's messages, starting at index `first`."""
        for n in range(first, len(self.messages)):
            if self.messages[n]["role"] == "assistant":
                yield n

    def last_user_before(self, n: int) -> int | None:
        """Return the index of the last user message before message n; None: no message before it is from the user."""
        for index in range(n - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                return index
        return None

    def whole(self) -> Rendered:
        """Render all messages."""
        return self._render(len(self.messages), is_prompt=self.is_prompt)

    def prompt(self, n: int) -> str:
        """Return the text that chat sends for message n."""
        return self._render(n, is_prompt=True).text + self.header

    def after(self, n: int) -> str:
        """Return the text of the messages up to and including message n."""
        return self._render(n + 1, is_prompt=False).text

    def _render(self, n: int, *, is_prompt: bool) -> Rendered:
        """Render the first n messages."""
        key = (n, is_prompt)
        if key not in self._rendered:
            self._rendered[key] = self.template.render(
                self.messages[:n], tools=self.tools, add_generation_prompt=is_prompt
            )
        return self._rendered[key]
