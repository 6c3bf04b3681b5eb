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
    """The place of an answer in the text of a conversation, in characters."""

    begin: int  # end of the text that chat sends before the answer; 0: unknown
    answer_end: int | None  # None: unknown
    turn_end: int  # end of the text that ends the turn; `begin` if `answer_end` is unknown

    def is_marked(self, targets: Sequence[Range]) -> bool:
        """Return whether a target begins in the answer."""
        return self.answer_end is not None and any(self.begin <= begin <= self.answer_end for begin, _ in targets)


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

    def cut_at(self, turn: Turn) -> None:
        """Begin a part at a turn, and cut the targets that overlap the turn."""
        self.cuts.add(turn.begin)
        self.targets = [_within(turn, target) for target in self.targets]

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
            turn = self._locate(renderings, n, text)
            marks.cut_at(turn)
            if turn.answer_end is not None:
                self._add_turn(marks, turn, turn.answer_end, message)
            elif message.get("weight") == 0 and not renderings.is_prompt:
                # The template changes earlier text, so only its marks locate the answer.
                marks.omitted.append(_span_of(renderings, n, whole))

        if not renderings.is_prompt:
            marks.end_at_last_target()
        return marks.parts(text)

    def _add_turn(self, marks: Marks, turn: Turn, answer_end: int, message: Message) -> None:
        """Add the end of a located turn to the targets; omit the turn if its message has the weight 0."""
        # A template may leave a message without content, or with calls, unmarked. Its end is a target nevertheless: the
        # model learns to end such a turn.
        is_target = turn.is_marked(marks.targets) or message.get("tool_calls") or not message.get("content")
        if is_target:
            marks.targets.append((answer_end, turn.turn_end))
        if is_target and not self.end.text and turn.turn_end == answer_end:
            marks.ends.add(answer_end)
        if message.get("weight") == 0:
            marks.omitted.append((turn.begin, turn.turn_end))

    def _locate(self, renderings: Renderings, n: int, text: str) -> Turn:
        """Locate message n in the text of a conversation."""
        prompt = renderings.prompt(n) if n else ""
        begin = len(prompt) if text.startswith(prompt) else 0
        end = self._end_of(renderings.after(n), text)
        if end is None:
            return Turn(begin, None, begin)
        # A template may render the end between messages, but not after the last one.
        name = self.end.added
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


def _within(turn: Turn, target: Range) -> Range:
    """Cut a target to an overlapping turn: drop the text before the turn, and the text after the end of the turn.

    Chat sends the text before the turn, and text after its end is never generated.
    """
    begin, end = target
    if begin < turn.begin < end:
        begin = turn.begin
    if turn.answer_end is not None and turn.begin <= begin <= turn.turn_end < end:
        end = turn.turn_end
    return begin, end


def _covers(ranges: Sequence[Range], begin: int, end: int) -> bool:
    """Return whether one of the ranges contains all characters from `begin` to `end`."""
    return any(first <= begin and end <= last for first, last in ranges)
