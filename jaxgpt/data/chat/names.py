"""Names of control tokens in messages and tools: mark them before rendering, so that they are encoded as text."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.data.chat.renderings import Renderings
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.control_tokens import ControlTokens, unused_mark
from jaxgpt.errors import UserError


class Protected(NamedTuple):
    """A conversation with marks in the names of control tokens."""

    renderings: Renderings
    mark: str  # character in the names; "": nothing needs a mark


class NameMarker:
    """Marks names in conversations (`ControlTokens.protect`).

    Args:
        template: chat template.
        control: control tokens of the tokenizer.
    """

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self._template = template
        self._control = control
        # Strings that the template may look for in messages.
        names = control.names.values()
        self._markup = frozenset(text for text in template.strings if len(text) > 1 and text not in names)

    def protected(self, renderings: Renderings) -> Protected:
        """Mark the names of control tokens in a conversation.

        A template may join parts of names, so it is safer to also mark every character that begins a name. The safer marks
        are used unless they change the rendered text. In that case, only complete names are marked.

        Raises:
            UserError: if the template joins parts of names, and the safer marks change the rendered text.
        """
        values = [renderings.messages, renderings.tools, self._template.variables, self._template.source]
        mark = unused_mark(values)
        safer = self._marked(renderings, mark, self._markup)
        if (safer.messages, safer.tools) == (renderings.messages, renderings.tools):
            return Protected(renderings, "")

        marked = self._marked(renderings, mark, None)
        safer_text = safer.whole().text
        text = marked.whole().text
        if text.replace(mark, "") == safer_text.replace(mark, ""):
            return Protected(safer, mark)
        if len(self._control.unmarked(text, mark)) > len(self._control.unmarked(safer_text, mark)):
            raise UserError(
                "the chat template joins parts of the messages to a special token: remove them from the messages"
            )
        return Protected(marked, mark)

    def _marked(self, renderings: Renderings, mark: str, markup: frozenset[str] | None) -> Renderings:
        """Mark names in messages and tools; `markup` as in `ControlTokens.protect`."""
        protect = self._control.protect
        messages = []
        for message in renderings.messages:
            kept = self._template.answer_tokens if message["role"] == "assistant" else ()
            messages.append(protect(message, mark, kept, markup))
        return renderings.replaced(messages, protect(renderings.tools, mark, (), markup))
