"""Parts of a conversation: locate the assistant's answers by rendering each of them as the last message.

The text of an answer is the text that rendering one more message adds to the prompt. `chat.marked` locates answers that a
template marks.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.data.chat.frame import Frame
from jaxgpt.data.chat.renderings import Renderings
from jaxgpt.data.chat.turn_end import TurnEnd
from jaxgpt.errors import UserError, short_repr


class Part(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_target: bool = False
    adds_end: bool = False  # whether `TurnEnd.ids` are appended to the ids of the part


class RenderedAnswers(NamedTuple):
    """Locates the answers of conversations in the text of a template without `{% generation %}`.

    Attributes:
        frame: text that the template adds around messages.
        end: end of the assistant's turn.
    """

    frame: Frame
    end: TurnEnd

    def sequences(self, renderings: Renderings) -> list[list[Part]]:
        """Split a conversation into sequences of parts; for a prompt, the last sequence is the text that chat sends.

        All answers are in one sequence, unless the template changes earlier text when messages are added. In that
        case, an answer after a change begins a new sequence.

        Raises:
            UserError: if the text of an answer cannot be located, or the first message of a complete conversation has the role
                assistant.
        """
        if renderings.messages[0]["role"] == "assistant" and not renderings.is_prompt:
            raise UserError("the first message has the role assistant: begin with a user message")

        sequences = _Sequences(self.end.added)
        for n in renderings.answers():
            answer = self._answer(renderings, n) or self._answer_of_turn(renderings, n)
            if answer is not None:
                if renderings.messages[n].get("weight") == 0:
                    answer = [part._replace(is_target=False) for part in answer]
                sequences.extend_to(renderings.prompt(n))
                sequences.append(answer)
            elif renderings.is_prompt:
                sequences.end()
            else:
                raise _not_located(renderings, n)

        if renderings.is_prompt:
            sequences.extend_to(renderings.prompt(len(renderings.messages)))
        return sequences.all

    def _answer(self, renderings: Renderings, n: int) -> list[Part] | None:
        """Return the parts of message n, rendered as the last message; None: the rendering does not begin with the prompt."""
        prompt = renderings.prompt(n)
        after = renderings.after(n)
        if not after.startswith(prompt):
            return None
        text = after.removeprefix(prompt)

        # Training omits the text that the template adds only to the last answer, unless the message itself has this text.
        opening = self.frame.opening
        content = str(renderings.messages[n].get("content"))
        if opening and opening.strip() not in content:
            text = text.removeprefix(opening)
        return self._split_end(text)

    def _split_end(self, text: str) -> list[Part]:
        """Return the parts of an answer, from the text that the template renders for the answer and the end of its turn."""
        tail = self.frame.tail
        if tail is None or not text.endswith(tail):  # a different end, for example of a message with tool calls
            return [Part(text.rstrip(), is_target=True)]
        answer = text.removesuffix(tail)
        if not self.end.text:
            return [Part(answer, is_target=True, adds_end=True)]
        return [Part(answer, is_target=True), Part(self.end.text, is_target=True)]

    def _answer_of_turn(self, renderings: Renderings, n: int) -> list[Part] | None:
        """Return the parts of message n, rendered without the messages before its request; None: not located.

        A template may change earlier text when an answer is added: Mistral's template writes the system message into the last
        message if that message is the user's.
        """
        begin = renderings.last_user_before(n)
        if not begin:  # also 0, because nothing is before the request
            return None
        return self._answer(renderings.since(begin), n - begin)


class _Sequences:
    """Sequences of parts; the last sequence grows with the conversation.

    Args:
        added_end: name of the control token that ends an answer without a rendered end (`TurnEnd.added`).

    Attributes:
        all: the sequences so far.
    """

    def __init__(self, added_end: str) -> None:
        self.all = list[list[Part]]()
        self._text: str | None = None  # text of the last sequence; None: the next prompt begins a sequence
        self._added_end = added_end

    def end(self) -> None:
        """End the last sequence: the next prompt begins a new sequence."""
        self._text = None

    def append(self, answer: list[Part]) -> None:
        """Append the parts of an answer to the prompt before it."""
        assert self._text is not None
        self.all[-1] += answer
        self._text += "".join(part.text for part in answer)

    def extend_to(self, prompt: str) -> None:
        """Append the remainder of a prompt; begin a sequence if the last has ended, or the prompt changes its text."""
        if self._text is None or not prompt.startswith(self._text):
            self.all.append([])
            self._text = ""
        parts = self.all[-1]
        text = prompt.removeprefix(self._text)
        self._text = prompt

        # Between messages, the template may render the end that it omits after the last answer: the rendered end is the target.
        renders_end = self._added_end != "" and text.startswith(self._added_end)
        if renders_end and parts and parts[-1].adds_end:
            answer = parts.pop()
            parts.append(answer._replace(adds_end=False))
            parts.append(Part(self._added_end, answer.is_target))
            text = text.removeprefix(self._added_end)
        parts.append(Part(text))


def _not_located(renderings: Renderings, n: int) -> UserError:
    """Return the error for message n, an answer whose text does not follow the prompt of chat."""
    before = renderings.after(n - 1)
    prompt = renderings.prompt(n)
    problem = "the chat template changes earlier text when a message is added"
    solution = "mark it in the template with {% generation %} and {% endgeneration %}"
    if renderings.after(n).startswith(before) and prompt.startswith(before):
        header = prompt.removeprefix(before)
        problem = f"chat sends {short_repr(header)} before an answer, and the chat template does not render the answer after it"
        solution = (
            f"set a variable of the template that changes this text, for example --data.chat-template-kwargs "
            f"'{{\"enable_thinking\": false}}', or {solution}"
        )
    return UserError(f"the assistant's text in message {n + 1} cannot be located: {problem}; {solution}")
