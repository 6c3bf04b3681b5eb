"""Parts of a conversation: locate the assistant's answers that a chat template marks with `{% generation %}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from jaxgpt.data.chat.frame import Frame
from jaxgpt.data.chat.parts import Part
from jaxgpt.data.chat.renderings import Renderings
from jaxgpt.data.chat.template import Message, Rendered
from jaxgpt.data.chat.turn_end import TurnEnd
from jaxgpt.errors import UserError

Range = tuple[int, int]  # [begin, end) of the characters in the text of a conversation


class Turn(NamedTuple):
    """The place of an answer and its end in the text of a conversation, as indices of characters."""

    begin: int  # end of the text that chat sends before the answer; 0: the conversation does not begin with this text
    answer_end: int
    turn_end: int  # end of the text that ends the turn

    def is_marked(self, targets: Sequence[Range]) -> bool:
        """Return whether a target begins in the answer."""
        return any(self.begin <= begin <= self.answer_end for begin, _ in targets)


@dataclass
class Marks:
    """The targets in the text of a conversation, and the bounds of its parts, as indices of characters.

    Attributes:
        targets: ranges of targets.
        cuts: indices at which parts begin or end, in addition to the bounds of targets.
        omitted: ranges of messages with the weight 0, which are not targets.
        ends: indices at which the end of a turn is missing in the text.
    """

    targets: list[Range]
    cuts: set[int]
    omitted: list[Range] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)

    def begin_turn(self, turn_begin: int) -> None:
        """Begin a part at `turn_begin`, and a target around it: chat sends the text before the turn."""
        self.cuts.add(turn_begin)
        self.targets = [(turn_begin if begin < turn_begin < end else begin, end) for begin, end in self.targets]

    def end_turn(self, turn: Turn) -> None:
        """Truncate targets that begin in a turn and end after it: the text after a turn is never generated."""
        for number, (begin, end) in enumerate(self.targets):
            if turn.begin <= begin <= turn.turn_end < end:
                self.targets[number] = (begin, turn.turn_end)

    def end_at_last_target(self) -> None:
        """Drop the text after the last target."""
        last = max(end for _, end in self.targets)
        self.cuts = {min(cut, last) for cut in self.cuts}

    def parts(self, text: str) -> list[Part]:
        """Split the text of the conversation into parts."""
        parts = list[Part]()
        for begin, end in pairwise(sorted(self.cuts.union(*self.targets))):
            is_target = _covers(self.targets, begin, end) and not _covers(self.omitted, begin, end)
            parts.append(Part(text[begin:end], is_target))
            if end in self.ends:
                parts.append(Part("", is_target=not _covers(self.omitted, end, end), adds_end=True))
        return parts


class MarkedAnswers(NamedTuple):
    """Locates the answers of conversations in the text of a template with `{% generation %}`.

    Attributes:
        frame: text that the template adds around messages.
        end: end of the assistant's turn.
    """

    frame: Frame
    end: TurnEnd

    def parts(self, renderings: Renderings, whole: Rendered) -> list[Part]:
        """Split a conversation at `{% generation %}`; targets begin after the prompt and include the end of the turn.

        Args:
            renderings: the conversation.
            whole: rendering of all messages.

        Raises:
            UserError: if the text of an answer with the weight 0 cannot be located.
        """
        text = renderings.prompt(len(renderings.messages)) if renderings.is_prompt else whole.text
        targets = [self._without_tail(text, begin, end) for begin, end in whole.spans]
        marks = Marks(targets, cuts={0, len(text)})
        for n in renderings.answers(first=0):
            message = renderings.messages[n]
            begin = self._begin(renderings, n, text)
            marks.begin_turn(begin)
            turn = self._located(renderings, n, text, begin)
            if turn is not None:
                marks.end_turn(turn)
                self._add_turn(marks, turn, message)
            elif message.get("weight") == 0 and not renderings.is_prompt:
                # The template changes earlier text, so only its marks locate the answer.
                marks.omitted.append(_span_of(renderings, n, whole))

        if not renderings.is_prompt:
            marks.end_at_last_target()
        return marks.parts(text)

    def _add_turn(self, marks: Marks, turn: Turn, message: Message) -> None:
        """Add the end of a located turn to the targets; omit the turn if its message has the weight 0."""
        # A template may leave a message without content, or with calls, unmarked. Its end is a target nevertheless: the
        # model learns to end such a turn.
        is_target = turn.is_marked(marks.targets) or message.get("tool_calls") or not message.get("content")
        if is_target:
            marks.targets.append((turn.answer_end, turn.turn_end))
        if is_target and not self.end.text and turn.turn_end == turn.answer_end:
            marks.ends.add(turn.answer_end)
        if message.get("weight") == 0:
            marks.omitted.append((turn.begin, turn.turn_end))

    def _begin(self, renderings: Renderings, n: int, text: str) -> int:
        """Return the index at which message n begins in the text of a conversation (`Turn.begin`)."""
        prompt = renderings.prompt(n) if n else ""
        return len(prompt) if text.startswith(prompt) else 0

    def _located(self, renderings: Renderings, n: int, text: str, begin: int) -> Turn | None:
        """Locate message n, which begins at index `begin`, in the text of a conversation; None: its end is not found."""
        answer_end = self._end_of(renderings.after(n), text)
        if answer_end is None:
            return None
        # A template may render the token that ends a turn (`TurnEnd.added`) between messages, but not after the last message.
        name = self.end.added
        is_rendered = name != "" and text.startswith(name, answer_end)
        end_text = name if is_rendered else self.end.text
        return Turn(begin, answer_end, answer_end + len(end_text))

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


def _span_of(renderings: Renderings, n: int, whole: Rendered) -> Range:
    """Return the marked range of message n; raise `UserError` unless each answer has a marked range."""
    answers = [*renderings.answers(first=0)]
    if len(answers) != len(whole.spans):
        raise UserError(
            f"message {n + 1} has the weight 0, but its text cannot be located: the chat template changes earlier text, and "
            f"marks {len(whole.spans)} texts of {len(answers)} answers; mark each answer with {{% generation %}}, or omit "
            f"such records"
        )
    return whole.spans[answers.index(n)]


def _covers(ranges: Sequence[Range], begin: int, end: int) -> bool:
    """Return whether one of the ranges contains all characters from `begin` to `end`."""
    return any(first <= begin and end <= last for first, last in ranges)
