"""The frame of messages in a chat template: headers, the end of a turn, and text added to answers.

A template is a program, so the frame is read from renderings of short conversations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxgpt.data.chat.probes import CONTEXTS, PROBED
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

QUESTION = {"role": "user", "content": "Zq7question"}
ANSWER = {"role": "assistant", "content": "Zq7answer"}
OTHER_ANSWER = {"role": "assistant", "content": "Kj4hobbit"}  # same length, other letters
THOUGHT = "<think>\nZq7thought\n</think>\n\n"  # text before the content of an answer


class Frame(NamedTuple):
    """The text that a template adds around messages.

    Attributes:
        header: text between the messages and an answer, if the template ignores `add_generation_prompt`.
        opening: text that the template adds only to the last answer, such as an empty think block; training omits it.
        kept_opening: text that the template adds to an answer after the text that chat sends. The model must generate this
            text, so it is a target. Example: the end of a think block that begins in the prompt.
        lead: white space that the template adds before an answer, and that the model generates.
        tail: text after an answer; None: unknown.
        around_user: text around a user's message.
    """

    header: str = ""
    opening: str = ""
    kept_opening: str = ""
    lead: str = ""
    tail: str | None = None
    around_user: str = ""


class TurnEnd(NamedTuple):
    """The end of the assistant's turn.

    Attributes:
        text: text that the template renders after an answer, up to the first control token (if any), without trailing white
            space; may be empty.
        ids: ids to append to an answer, because the template renders nothing after it.
        added: name of the control token in `ids`, which the template may render between messages; "": no such name.
        stop_id: id that ends generation, or None.
        stop: text that ends generation if `stop_id` is None; may be empty.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    added: str = ""
    stop_id: int | None = None
    stop: str = ""


def read_frame(template: ChatTemplate) -> Frame:
    """Read the frame of messages from renderings of a question and an answer.

    A template may need a system message or tools, and may read only answers with a think block. Such an answer shows only the
    tail and the text around a user's message.
    """
    for thought in ("", THOUGHT):
        for before, tools in CONTEXTS:
            frame = _Probe(template, [*before, QUESTION], tools, thought).frame()
            if frame is None:
                continue
            if thought:
                return Frame(tail=frame.tail, around_user=frame.around_user)
            return frame
    return Frame()


class _Probe(NamedTuple):
    """A short conversation that shows the frame of a template.

    Attributes:
        template: chat template.
        asked: messages up to a question.
        tools: tools of the conversation.
        thought: text before the answer in the content of the assistant's message.
    """

    template: ChatTemplate
    asked: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thought: str = ""

    def frame(self) -> Frame | None:
        """Return the frame; None: the template fails, or its text does not depend on the answer."""
        try:
            prompt = self.rendered(add_generation_prompt=True)
            question = self.rendered()
            around = self.around_answer()
        except UserError:
            return None
        if around is None:
            return None
        before, tail = around

        # Replace the question with a line break, so that the texts around it are not joined to the name of a token.
        frame = Frame(tail=tail, around_user=question.replace(QUESTION["content"], "\n"))
        if not before.startswith(prompt):
            return frame
        added = before.removeprefix(prompt)  # text between the prompt and the answer
        if not added.strip():  # white space before an answer belongs to the first token of the answer
            return frame._replace(lead=added)
        if prompt == question:
            header = added.rstrip(" ")
            return frame._replace(header=header, lead=added.removeprefix(header))
        if self.is_generated(added, prompt):
            return frame._replace(kept_opening=added)
        return frame._replace(opening=added)

    def around_answer(self) -> tuple[str, str] | None:
        """Return the texts before and after the last answer; None: unknown."""
        whole = self.rendered(self.with_thought(ANSWER))
        before, found, tail = whole.rpartition(ANSWER["content"])
        if found:
            return before, tail

        # The template changes the content, for example to capitals: compare with the text of a different answer.
        other = self.rendered(self.with_thought(OTHER_ANSWER))
        if other == whole:
            return None
        before = _common_prefix(whole, other)
        reversed_tail = _common_prefix(whole[::-1], other[::-1])
        return before, reversed_tail[::-1]

    def is_generated(self, added: str, prompt: str) -> bool:
        """Return whether the model must generate a text that the template adds to the last answer.

        This is the case if earlier answers also have the text, or do not follow the prompt. In the second case, the text may
        continue the prompt, for example end a think block. It is also true if the template rejects earlier
        answers.
        """
        try:
            one = self.rendered(self.with_thought(ANSWER), QUESTION)
            two = self.rendered(self.with_thought(OTHER_ANSWER), QUESTION)
        except UserError:
            return True
        before = _common_prefix(one, two)
        return before.endswith(added) or not before.startswith(prompt)

    def with_thought(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an assistant's message with the thought before its content."""
        return message | {"content": self.thought + message["content"]}

    def rendered(self, *after: dict[str, Any], add_generation_prompt: bool = False) -> str:
        """Render the conversation with further messages."""
        messages = [*self.asked, *after]
        rendered = self.template.render(
            messages, tools=self.tools, add_generation_prompt=add_generation_prompt, limit=PROBED
        )
        return rendered.text


def _common_prefix(one: str, two: str) -> str:
    """Return the longest common beginning of two texts."""
    for n, (first, second) in enumerate(zip(one, two, strict=False)):
        if first != second:
            return one[:n]
    return min(one, two, key=len)


def find_end(tail: str | None, tokenizer: Tokenizer, control: ControlTokens) -> TurnEnd:
    """Find the end of a turn in the text after an answer: the first control token or, without control tokens, all text.

    If a template renders no text after an answer, the end-of-text token ends the turn.

    Args:
        tail: text that the template renders after an answer; None: unknown.
        tokenizer: tokenizer of the model.
        control: control tokens of the tokenizer.
    """
    if tail is None:
        return TurnEnd()
    if not tail.strip():
        eos_id = tokenizer.eos_id
        if eos_id is None:
            return TurnEnd()
        return TurnEnd(ids=(eos_id,), added=control.names.get(eos_id, ""), stop_id=eos_id)

    text = tail.rstrip()
    if isinstance(tokenizer, SubwordTokenizer):
        found = control.find(tail)
        if not found:
            return TurnEnd(text, stop=text)
        first = found[0]
        return TurnEnd(tail[: first.end].rstrip(), stop_id=first.id)
    try:
        ids = tokenizer.encode(text).tolist()
    except UserError:  # for example, for a character outside the vocabulary, which no model can generate
        ids = []
    return TurnEnd(text, stop_id=ids[0]) if len(ids) == 1 else TurnEnd(text, stop=text)
