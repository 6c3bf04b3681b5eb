"""Parts of a conversation: locate the assistant's answers in the text that a chat template renders.

A template may mark answers with `{% generation %}`. Otherwise, the text of an answer is the text that rendering one more
message adds to the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxgpt.data.chat_frame import Frame, TurnEnd
from jaxgpt.data.chat_renderings import Renderings
from jaxgpt.data.chat_template import Rendered
from jaxgpt.errors import UserError, short_repr


class Part(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_target: bool = False
    adds_end: bool = False  # whether `TurnEnd.ids` are appended to the ids of the part


Range = tuple[int, int]  # [begin, end) of the characters in the text of a conversation


class Turn(NamedTuple):
    """The place of an answer in the text of a conversation, in characters."""

    begin: int  # end of the text that chat sends before the answer; 0: unknown
    end: int | None  # end of the answer; None: unknown
    stop: int  # end of the text that ends the turn

    def is_marked(self, targets: Sequence[Range]) -> bool:
        """Return whether a target begins in the answer."""
        return self.end is not None and any(self.begin <= begin <= self.end for begin, _ in targets)


class AnswerFinder(NamedTuple):
    """Locates the answers of conversations in the text of a template.

    Attributes:
        frame: text that the template adds around messages.
        end: end of the assistant's turn.
        added_end: token that ends an answer because the template renders nothing after the last answer; "": none.
    """

    frame: Frame
    end: TurnEnd
    added_end: str

    def sequences(self, view: Renderings) -> list[list[Part]]:
        """Split a conversation into sequences of parts; for a prompt, the last sequence is the text that chat sends.

        All answers are in one sequence, unless the template changes earlier text when messages are added. In that
        case, an answer after a change begins a new sequence.

        Raises:
            UserError: if the text of an answer cannot be located, or the first message has the role assistant and the
                template has no `{% generation %}`.
        """
        whole = view.whole()
        if whole.spans:
            return [self._marked_parts(view, whole)]
        if view.messages[0]["role"] == "assistant" and not view.is_prompt:
            raise UserError("the first message has the role assistant: begin with a user message")
        return self._rendered_parts(view)

    # Answers without `{% generation %}`.

    def _rendered_parts(self, view: Renderings) -> list[list[Part]]:
        """Locate answers by rendering each of them as the last message."""
        sequences = list[list[Part]]()
        text: str | None = None  # text of the last sequence; None: the next answer begins a new sequence
        for n in view.answers():
            prompt = view.prompt(n)
            answer = self._answer(view, n) or self._answer_of_turn(view, n)
            if answer is None and not view.is_prompt:
                raise _not_located(view, n)
            if answer is None:
                text = None
                continue

            self._continue_last(sequences, text, prompt)
            if view.messages[n].get("weight") == 0:
                answer = [part._replace(is_target=False) for part in answer]
            sequences[-1] += answer
            text = prompt + "".join(part.text for part in answer)

        if view.is_prompt:
            self._continue_last(sequences, text, view.prompt(len(view.messages)))
        return sequences

    def _continue_last(self, sequences: list[list[Part]], text: str | None, prompt: str) -> None:
        """Continue the last sequence to a prompt that begins with its text, `text`; otherwise, begin a new sequence."""
        if text is None or not prompt.startswith(text):
            sequences.append([])
            text = ""
        self._continue(sequences[-1], prompt[len(text) :])

    def _continue(self, parts: list[Part], text: str) -> None:
        """Append text that is not a target; if it begins with `added_end`, this token is the end of the last answer."""
        last = parts[-1] if parts else Part("")
        name = self.added_end
        if last.adds_end and name and text.startswith(name):
            parts[-1] = last._replace(adds_end=False)
            parts.append(Part(name, last.is_target))
            text = text.removeprefix(name)
        parts.append(Part(text))

    def _answer(self, view: Renderings, n: int) -> list[Part] | None:
        """Return the parts of message n, rendered as the last message; None: the text before it is not the prompt."""
        prompt = view.prompt(n)
        after = view.after(n)
        if not after.startswith(prompt):
            return None
        text = after[len(prompt) :]

        opening = self.frame.opening
        is_own = opening.strip() in str(view.messages[n].get("content"))
        if opening and text.startswith(opening) and not is_own:
            text = text.removeprefix(opening)

        tail = self.frame.tail
        if tail is None or not text.endswith(tail):  # a different end, for example of a message with tool calls
            return [Part(text.rstrip(), is_target=True)]
        answer = text.removesuffix(tail)
        if not self.end.text:
            return [Part(answer, is_target=True, adds_end=True)]
        return [Part(answer, is_target=True), Part(self.end.text, is_target=True)]

    def _answer_of_turn(self, view: Renderings, n: int) -> list[Part] | None:
        """Return the parts of message n, rendered without the messages before its request; None: not located.

        A template may change earlier text when an answer is added: Mistral's template writes the system message into the last
        message if that message is the user's.
        """
        begin = view.last_user_before(n)
        if not begin:  # also 0, because nothing is before the request
            return None
        return self._answer(view.since(begin), n - begin)

    # Answers marked with `{% generation %}`.

    def _marked_parts(self, view: Renderings, whole: Rendered) -> list[Part]:
        """Split a conversation at `{% generation %}`; targets begin after the prompt and include the end of the turn."""
        text = view.prompt(len(view.messages)) if view.is_prompt else whole.text
        targets = [self._without_tail(text, begin, end) for begin, end in whole.spans]
        cuts = {0, len(text)}
        omitted = list[Range]()  # messages with the weight 0
        ends = set[int]()  # indices at which the end of a turn is missing in the text
        for n in view.answers(first=0):
            message = view.messages[n]
            is_omitted = message.get("weight") == 0
            turn = self._locate(view, n, text)
            cuts.add(turn.begin)
            targets = [_within(turn, each) for each in targets]

            # If the template changes earlier text, only the marks locate the answer, and its end is not a target.
            if turn.end is None:
                if is_omitted and not view.is_prompt:
                    omitted.append(_span_of(view, n, whole))
                continue

            # A template may leave a message without content, or with calls, unmarked. The model still ends its turn.
            is_target = turn.is_marked(targets) or message.get("tool_calls") or not message.get("content")
            if is_target:
                targets.append((turn.end, turn.stop))
            if is_target and not self.end.text and turn.stop == turn.end:
                ends.add(turn.end)
            if is_omitted:
                omitted.append((turn.begin, turn.stop))

        if not view.is_prompt:  # a training sequence ends with its last target
            last = max(end for _, end in targets)
            cuts = {min(cut, last) for cut in cuts}
        return _split(text, cuts, targets, omitted, ends)

    def _locate(self, view: Renderings, n: int, text: str) -> Turn:
        """Locate message n in the text of a conversation."""
        prompt = view.prompt(n) if n else ""
        begin = len(prompt) if text.startswith(prompt) else 0
        end = self._end_of(view.after(n), text)
        if end is None:
            return Turn(begin, None, begin)
        # A template may render the end between messages, but not after the last one.
        name = self.added_end
        is_rendered = name != "" and text.startswith(name, end)
        return Turn(begin, end, end + len(name if is_rendered else self.end.text))

    def _without_tail(self, text: str, begin: int, end: int) -> Range:
        """Return the range of a marked answer without the text after the end of its turn, which is never generated."""
        tail = self.frame.tail or ""
        if self.end.text and text.endswith(tail, begin, end):
            end += len(self.end.text) - len(tail)
        return begin, end

    def _end_of(self, after: str, text: str) -> int | None:
        """Return the index in `text` of the end of the last answer of `after`; None: not found."""
        tail = self.frame.tail
        if tail is None or not after.endswith(tail):
            return None
        end = len(after) - len(tail)
        return end if text.startswith(after[:end] + self.end.text) else None


def _not_located(view: Renderings, n: int) -> UserError:
    """Return the error for message n, an answer whose text does not follow the prompt of chat."""
    before = view.after(n - 1)
    prompt = view.prompt(n)
    problem = "the chat template changes earlier text when a message is added"
    solution = "mark it in the template with {% generation %} and {% endgeneration %}"
    if view.after(n).startswith(before) and prompt.startswith(before):
        header = prompt.removeprefix(before)
        problem = f"chat sends {short_repr(header)} before an answer, and the chat template does not render the answer after it"
        solution = (
            f"set a variable of the template that changes this text, for example --data.chat-template-kwargs "
            f"'{{\"enable_thinking\": false}}', or {solution}"
        )
    return UserError(f"the assistant's text in message {n + 1} cannot be located: {problem}; {solution}")


def _span_of(view: Renderings, n: int, whole: Rendered) -> Range:
    """Return the marked range of message n; raise `UserError` unless each answer has a marked range."""
    answers = [*view.answers(first=0)]
    if len(answers) != len(whole.spans):
        raise UserError(
            f"message {n + 1} has the weight 0, but its text cannot be located: the chat template changes earlier text, and "
            f"marks {len(whole.spans)} texts of {len(answers)} answers; mark each answer with {{% generation %}}, or omit "
            f"such records"
        )
    return whole.spans[answers.index(n)]


def _within(turn: Turn, target: Range) -> Range:
    """Cut a target to a turn that begins in it: drop the text before the turn, and the text after the end of the turn.

    Chat sends the text before the turn, and text after its end is never generated.
    """
    begin, end = target
    if begin < turn.begin < end:
        begin = turn.begin
    if turn.end is not None and turn.begin <= begin <= turn.stop < end:
        end = turn.stop
    return begin, end


def _split(text: str, cuts: set[int], targets: Sequence[Range], omitted: Sequence[Range], ends: set[int]) -> list[Part]:
    """Split a text into parts.

    Args:
        text: text of a conversation.
        cuts: indices at which parts begin or end, in addition to the bounds of targets.
        targets: ranges of targets.
        omitted: ranges without targets.
        ends: indices at which to add the end of a turn.
    """
    parts = list[Part]()
    for begin, end in pairwise(sorted(cuts.union(*targets))):
        parts.append(Part(text[begin:end], _covers(targets, begin, end) and not _covers(omitted, begin, end)))
        if end in ends:
            parts.append(Part("", is_target=not _covers(omitted, end, end), adds_end=True))
    return parts


def _covers(ranges: Sequence[Range], begin: int, end: int) -> bool:
    return any(a <= begin and end <= b for a, b in ranges)
