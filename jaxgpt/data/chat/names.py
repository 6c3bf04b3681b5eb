"""Names of control tokens in messages and tools: mark them before rendering, so that they are encoded as text."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.data.chat.renderings import Renderings
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.data.tokenizers.marks import Marking, protect, unmarked, unused_mark
from jaxgpt.errors import UserError


class Protected(NamedTuple):
    """A conversation with marks in the names of control tokens."""

    renderings: Renderings
    mark: str  # character in the names; "": nothing needs a mark


class NameMarker:
    """Marks names in conversations (`marks.protect`).

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
        safer = self._marked(renderings, Marking(mark, self._markup))
        if (safer.messages, safer.tools) == (renderings.messages, renderings.tools):
            return Protected(renderings, "")

        marked = self._marked(renderings, Marking(mark))
        safer_text = safer.whole().text
        text = marked.whole().text
        if text.replace(mark, "") == safer_text.replace(mark, ""):
            return Protected(safer, mark)
        if len(unmarked(self._control, text, mark)) > len(unmarked(self._control, safer_text, mark)):
            raise UserError(
                "the chat template joins parts of the messages to a special token: remove them from the messages"
            )
        return Protected(marked, mark)

    def _marked(self, renderings: Renderings, marking: Marking) -> Renderings:
        """Mark names in messages and tools; in messages of the assistant, the tokens of answers are kept."""
        messages = []
        for message in renderings.messages:
            kept = self._template.answer_tokens if message["role"] == "assistant" else ()
            messages.append(protect(self._control, message, marking._replace(kept=kept)))
        return renderings.replaced(messages, protect(self._control, renderings.tools, marking))
