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

        sequences = list[list[Part]]()
        text: str | None = None  # text of the last sequence; None: the next answer begins a new sequence
        for n in renderings.answers():
            prompt = renderings.prompt(n)
            answer = self._answer(renderings, n) or self._answer_of_turn(renderings, n)
            if answer is None and not renderings.is_prompt:
                raise _not_located(renderings, n)
            if answer is None:
                text = None
                continue

            self._continue_last(sequences, text, prompt)
            if renderings.messages[n].get("weight") == 0:
                answer = [part._replace(is_target=False) for part in answer]
            sequences[-1] += answer
            text = prompt + "".join(part.text for part in answer)

        if renderings.is_prompt:
            self._continue_last(sequences, text, renderings.prompt(len(renderings.messages)))
        return sequences

    def _continue_last(self, sequences: list[list[Part]], text: str | None, prompt: str) -> None:
        """Continue the last sequence to a prompt that begins with its text, `text`; otherwise, begin a new sequence."""
        if text is None or not prompt.startswith(text):
            sequences.append([])
            text = ""
        self._continue(sequences[-1], prompt[len(text) :])

    def _continue(self, parts: list[Part], text: str) -> None:
        """Append text that is not a target; if it begins with the added end, this token is the end of the last answer."""
        last = parts[-1] if parts else Part("")
        name = self.end.added
        if last.adds_end and name and text.startswith(name):
            parts[-1] = last._replace(adds_end=False)
            parts.append(Part(name, last.is_target))
            text = text.removeprefix(name)
        parts.append(Part(text))

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
