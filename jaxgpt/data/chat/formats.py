"""The formats of a model's conversations for training, and the messages of a conversation that they omit."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.config import DataConfig
from jaxgpt.data.chat.encoding import ChatFormat, chat_format
from jaxgpt.data.chat.omitted import omitted_messages
from jaxgpt.data.chat.records import ChatRecord, Pair
from jaxgpt.data.tokenizers.base import Tokenizer

DATE = "2024-07-26"  # date for templates that include it, fixed for deterministic encoding


class Formats(NamedTuple):
    """The formats of a model's conversations; None: the model has no chat template for them."""

    plain: ChatFormat | None  # conversations without tools
    with_tools: ChatFormat | None

    def of(self, chat: ChatRecord | Pair | str) -> ChatFormat | None:
        """Return the format of a conversation, or of a prompt that is a text."""
        has_tools = isinstance(chat, ChatRecord) and chat.tools is not None
        return self.with_tools if has_tools else self.plain

    def omitted_roles(self, chat: ChatRecord | Pair | str) -> list[str]:
        """Return the role of each message of a conversation that its chat template omits."""
        form = self.of(chat)
        if form is None or not isinstance(chat, ChatRecord):
            return []
        return omitted_messages(chat, form.template)


def formats_of(tokenizer: Tokenizer, data: DataConfig) -> Formats:
    """Return the formats of a model's conversations, with a fixed date."""
    return Formats(
        plain=chat_format(tokenizer, data, date=DATE),
        with_tools=chat_format(tokenizer, data, date=DATE, with_tools=True),
    )
