"""The frame of messages in a chat template: the texts that the template adds before and after an answer.

A template is a program, so the frame is read from renderings of short conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.data.chat.probes import CONTEXTS, PROBED, Context
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.errors import UserError

# Contents of messages, and contents of the same length with other letters.
QUESTION = "Zq7question"
OTHER_QUESTION = "Kj4riddling"
ANSWER = "Zq7answer"
OTHER_ANSWER = "Kj4hobbit"
THOUGHT = "<think>\nZq7thought\n</think>\n\n"  # text before the content of an answer


class Frame(NamedTuple):
    """The text that a template adds around messages.

    A template may add text between the prompt, which is its text with `add_generation_prompt`, and the answer. The fields for
    this text, with an example of each:

        field          prompt ends with           added text
        header         the question               "<|im_start|>assistant\\n"; the template ignores `add_generation_prompt`
        opening        "<|im_start|>assistant\\n"  "<think>\\n\\n</think>\\n\\n", only before the last answer
        kept_opening   "<think>\\n"                "\\n</think>\\n\\n"
        lead           "[/INST]"                  " "

    Attributes:
        header: text that chat sends in addition to the prompt.
        opening: text that chat does not send, and that training omits.
        kept_opening: text that chat does not send. The model must generate this text, so it is a target.
        lead: white space that the model generates, with or without a header.
        tail: text after an answer; None: unknown.
        around_user: text around a user's message, with a line break in place of the message.
    """

    header: str = ""
    opening: str = ""
    kept_opening: str = ""
    lead: str = ""
    tail: str | None = None
    around_user: str = ""


def read_frame(template: ChatTemplate) -> Frame:
    """Read the frame of messages from renderings of a question and an answer.

    A template may need a system message or tools, and may read only answers with a think block. Such an answer shows only the
    tail and the text around a user's message.
    """
    for thought in ("", THOUGHT):
        for context in CONTEXTS:
            frame = _Probe(template, context, thought).frame()
            if frame is None:
                continue
            if thought:
                return Frame(tail=frame.tail, around_user=frame.around_user)
            return frame
    return Frame()


class _Around(NamedTuple):
    """The rendered text before and after the content of a message."""

    before: str
    after: str


class _Probe(NamedTuple):
    """Renders short conversations, with a question and an answer, that show the frame of a template.

    Attributes:
        template: chat template.
        context: messages before the question, and tools.
        thought: text before the answer in the content of the assistant's message.
    """

    template: ChatTemplate
    context: Context
    thought: str

    def frame(self) -> Frame | None:
        """Return the frame; None: the template fails, or its text does not depend on the answer."""
        question = self._user(QUESTION)
        try:
            prompt = self._rendered(question, add_generation_prompt=True)
            asked = self._rendered(question)
            around_question = _around(lambda text: self._rendered(self._user(text)), QUESTION, OTHER_QUESTION)
            around_answer = _around(lambda text: self._rendered(question, self._assistant(text)), ANSWER, OTHER_ANSWER)
        except UserError:
            return None
        if around_answer is None:
            return None

        around_user = asked
        if around_question is not None:
            # The line break separates the texts, so that they are not joined to the name of a token.
            around_user = "\n".join(around_question).replace(QUESTION, "\n")
        frame = Frame(tail=around_answer.after, around_user=around_user)
        if not around_answer.before.startswith(prompt):
            return frame

        added = around_answer.before.removeprefix(prompt)  # text between the prompt and the answer
        if not added.strip():
            return frame._replace(lead=added)
        if prompt == asked:
            header = added.rstrip(" ")
            return frame._replace(header=header, lead=added.removeprefix(header))
        if self._is_generated(added, prompt):
            return frame._replace(kept_opening=added)
        return frame._replace(opening=added)

    def _is_generated(self, added: str, prompt: str) -> bool:
        """Return whether the model must generate a text that the template adds between the prompt and the last answer.

        It must if earlier answers also have this text, or do not follow the prompt: in this case, the prompt may begin a think
        block that the text ends. If the template rejects earlier answers, it must as well.
        """
        question = self._user(QUESTION)
        try:
            one = self._rendered(question, self._assistant(ANSWER), question)
            two = self._rendered(question, self._assistant(OTHER_ANSWER), question)
        except UserError:
            return True
        before_earlier = _common_beginning(one, two)
        return before_earlier.endswith(added) or not before_earlier.startswith(prompt)

    def _user(self, text: str) -> dict[str, Any]:
        """Return a user's message."""
        return {"role": "user", "content": text}

    def _assistant(self, text: str) -> dict[str, Any]:
        """Return an assistant's message with the thought before its text."""
        return {"role": "assistant", "content": self.thought + text}

    def _rendered(self, *messages: dict[str, Any], add_generation_prompt: bool = False) -> str:
        """Render messages after the context."""
        rendered = self.template.render(
            [*self.context.before, *messages],
            tools=self.context.tools,
            add_generation_prompt=add_generation_prompt,
            limit=PROBED,
        )
        return rendered.text


def _around(render: Callable[[str], str], text: str, other: str) -> _Around | None:
    """Return the rendered text before and after the content of a message; None: the rendered text does not depend on it.

    Args:
        render: function of the content that renders the conversation.
        text: content.
        other: a different content, without common letters at its ends.
    """
    whole = render(text)
    before, found, after = whole.rpartition(text)
    if found:
        return _Around(before, after)

    # The template changes the content, for example to capitals: compare with the text of a different content.
    changed = render(other)
    if changed == whole:
        return None
    reversed_after = _common_beginning(whole[::-1], changed[::-1])
    return _Around(_common_beginning(whole, changed), reversed_after[::-1])


def _common_beginning(one: str, two: str) -> str:
    """Return the longest common beginning of two texts."""
    for n, (first, second) in enumerate(zip(one, two, strict=False)):
        if first != second:
            return one[:n]
    return min(one, two, key=len)
