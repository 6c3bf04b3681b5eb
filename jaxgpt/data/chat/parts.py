"""Parts of a conversation: locate the assistant's answers by rendering each of them as the last message.

The text of an answer is the text that rendering one more message adds to the prompt. `chat.marked` locates answers that a
template marks.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.data.chat.frame import Frame, TurnEnd
from jaxgpt.data.chat.renderings import Renderings
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

        sequences = list[_Sequence]()
        current: _Sequence | None = None  # None: the next answer begins a new sequence
        for n in renderings.answers():
            answer = self._answer(renderings, n) or self._answer_of_turn(renderings, n)
            if answer is None and not renderings.is_prompt:
                raise _not_located(renderings, n)
            if answer is None:
                current = None
                continue

            current = self._continued(sequences, current, renderings.prompt(n))
            if renderings.messages[n].get("weight") == 0:
                answer = [part._replace(is_target=False) for part in answer]
            current.append(answer)

        if renderings.is_prompt:
            self._continued(sequences, current, renderings.prompt(len(renderings.messages)))
        return [sequence.parts for sequence in sequences]

    def _continued(self, sequences: list[_Sequence], current: _Sequence | None, prompt: str) -> _Sequence:
        """Continue a sequence to a prompt that begins with its text; otherwise, append a new sequence. Return the sequence."""
        if current is None or not prompt.startswith(current.text):
            current = _Sequence(self.end.added)
            sequences.append(current)
        current.extend_to(prompt)
        return current

    def _answer(self, renderings: Renderings, n: int) -> list[Part] | None:
        """Return the parts of message n, rendered as the last message; None: the rendering does not begin with the prompt."""
        prompt = renderings.prompt(n)
        after = renderings.after(n)
        if not after.startswith(prompt):
            return None
        text = after[len(prompt) :]

        opening = self.frame.opening
        is_own = opening.strip() in str(renderings.messages[n].get("content"))
        if opening and text.startswith(opening) and not is_own:
            text = text.removeprefix(opening)

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


class _Sequence:
    """A sequence of parts: the beginning of a conversation, up to the last answer so far.

    Args:
        added_end: name of the control token that ends an answer without a rendered end (`TurnEnd.added`).

    Attributes:
        parts: the parts so far.
        text: their text.
    """

    def __init__(self, added_end: str) -> None:
        self.parts = list[Part]()
        self.text = ""
        self._added_end = added_end

    def append(self, answer: list[Part]) -> None:
        """Append the parts of an answer."""
        self.parts += answer
        self.text += "".join(part.text for part in answer)

    def extend_to(self, prompt: str) -> None:
        """Append the remainder of a prompt, which is not a target, except the added end if the remainder begins with it."""
        text = prompt.removeprefix(self.text)
        last = self.parts[-1] if self.parts else Part("")
        name = self._added_end
        if last.adds_end and name and text.startswith(name):
            self.parts[-1] = last._replace(adds_end=False)
            self.parts.append(Part(name, last.is_target))
            text = text.removeprefix(name)
        self.parts.append(Part(text))
        self.text = prompt


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
