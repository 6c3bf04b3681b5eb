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

        A template may join parts of names, so thorough marks are safer (`Marking`). They are used unless they change the
        rendered text. In that case, only complete names are marked.

        Raises:
            UserError: if the template joins parts of names, and thorough marks change the rendered text.
        """
        values = [renderings.messages, renderings.tools, self._template.variables, self._template.source]
        mark = unused_mark(values)
        thorough = self._marked(renderings, Marking(mark, is_thorough=True, markup=self._markup))
        if (thorough.messages, thorough.tools) == (renderings.messages, renderings.tools):
            return Protected(renderings, "")

        simple = self._marked(renderings, Marking(mark))
        thorough_text = thorough.whole().text
        simple_text = simple.whole().text
        if simple_text.replace(mark, "") == thorough_text.replace(mark, ""):
            return Protected(thorough, mark)
        # A token that only simple marks leave in the text has been joined from parts of the messages.
        if len(unmarked(self._control, simple_text, mark)) > len(unmarked(self._control, thorough_text, mark)):
            raise UserError(
                "the chat template joins parts of the messages to a special token: remove them from the messages"
            )
        return Protected(simple, mark)

    def _marked(self, renderings: Renderings, marking: Marking) -> Renderings:
        """Mark names in messages and tools; in messages of the assistant, the tokens of answers are kept."""
        messages = []
        for message in renderings.messages:
            kept = self._template.answer_tokens if message["role"] == "assistant" else ()
            messages.append(protect(self._control, message, marking._replace(kept=kept)))
        return renderings.replaced(messages, protect(self._control, renderings.tools, marking))
