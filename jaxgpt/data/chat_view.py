"""Renderings of a conversation: the texts that a chat template renders from its first messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from jaxgpt.data.chat_template import ChatTemplate, Rendered


class View:
    """A conversation, and the texts that a template renders from its first messages.

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
        self._render = cache(self._rendered)

    def with_content(self, messages: list[dict[str, Any]], tools: Any) -> View:
        """Return a view of different messages and tools."""
        return View(self.template, messages, tools, self.header, self.is_prompt)

    def since(self, n: int) -> View:
        """Return the conversation without the first n messages."""
        return self.with_content(self.messages[n:], self.tools)

    def answers(self, first: int = 1) -> Iterator[int]:
        """Yield the indices of the assistant's messages, starting at index `first`."""
        for n in range(first, len(self.messages)):
            if self.messages[n]["role"] == "assistant":
                yield n

    def request(self, n: int) -> int:
        """Return the index of the last user message before message n; 0: not found."""
        users = [index for index in range(n) if self.messages[index]["role"] == "user"]
        return max(users, default=0)

    def whole(self) -> Rendered:
        """Render all messages."""
        return self._render(len(self.messages), self.is_prompt)

    def prompt(self, n: int) -> str:
        """Return the text that chat sends for message n."""
        return self._render(n, True).text + self.header

    def after(self, n: int) -> str:
        """Return the text of the messages up to and including message n."""
        return self._render(n + 1, False).text

    def _rendered(self, n: int, is_prompt: bool) -> Rendered:
        return self.template.render(self.messages[:n], tools=self.tools, add_generation_prompt=is_prompt)
