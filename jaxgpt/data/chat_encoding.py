"""Encode conversations: the ids that chat sends, and the sequences and targets of training.

Both come from `ChatFormat`. A training sequence consists of the ids that chat sends, the ids of the answer, and the end of
the turn. The targets are the answer and the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import DataConfig, check_variables
from jaxgpt.data.chat_frame import Frame, TurnEnd, find_end, read_frame
from jaxgpt.data.chat_template import ChatTemplate, Message, Rendered
from jaxgpt.data.control_tokens import ControlTokens, unused_mark
from jaxgpt.data.tokenizer import SubwordTokenizer, Tokenizer
from jaxgpt.errors import UserError, short_repr


class Conversation(NamedTuple):
    """An encoded conversation."""

    ids: np.ndarray  # int32
    is_target: np.ndarray  # bool; True for ids of the assistant's text, or of a completion, and for the end of the turn


class Part(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_target: bool = False
    adds_end: bool = False  # followed by the `ids` of the end of the turn


Range = tuple[int, int]  # [begin, end) of the characters in the text of a conversation


class Turn(NamedTuple):
    """The place of an answer in the text of a conversation, in characters."""

    begin: int  # end of the text that chat sends before the answer; 0: unknown
    end: int | None  # end of the answer; None: unknown
    stop: int  # end of the text that ends the turn

    def is_marked(self, targets: Sequence[Range]) -> bool:
        """Return whether a target begins in the answer."""
        return self.end is not None and any(self.begin <= begin <= self.end for begin, _ in targets)


class ChatFormat:
    """The format of conversations: a chat template and the tokenizer of its text.

    Args:
        template: chat template, with its variables.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self.tokenizer = tokenizer

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that chat sends for an answer to the last message.

        Raises:
            UserError: if the messages are malformed, or the template or the tokenizer rejects them.
        """
        sequences, mark = self._sequences(self.template.readable(messages), tools, is_prompt=True)
        ids: list[int] = self._encode(sequences[-1], mark).ids.tolist()
        return ids

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Conversation]:
        """Encode a complete conversation for training.

        All answers are in one sequence, unless the template changes earlier text when messages are added. Then an answer
        after a change begins a new sequence.

        Raises:
            UserError: as in `prompt_ids`; if no message has the role assistant; without `{% generation %}`: if the first
                message has this role, or the text of an answer cannot be located.
        """
        messages = self.template.readable(messages)
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise UserError(
                f"no message has the role assistant, but only assistant messages are trained on: the roles are "
                f"{short_repr(roles)}"
            )
        sequences, mark = self._sequences(messages, tools, is_prompt=False)
        return [self._encode(parts, mark) for parts in sequences]

    def content(self, answer: str) -> str:
        """Return the content of a generated answer, without the white space that the template adds around an answer."""
        text = answer.removeprefix(self.frame.lead)
        if self.end.stop_id is None:
            return text
        before_stop = self.end.text[: len(self.end.text) - len(self.end.text.lstrip())]
        return text.removesuffix(before_stop)

    @cached_property
    def frame(self) -> Frame:
        """The text that the template adds around messages."""
        return read_frame(self.template)

    @property
    def added_target(self) -> str:
        """The text that the template adds to answers and that is a target; "": none, or the template marks the targets."""
        return "" if "endgeneration" in self.template.source else self.frame.kept_opening

    @cached_property
    def end(self) -> TurnEnd:
        """The end of the assistant's turn."""
        return find_end(self.frame.tail, self.tokenizer, self._control)

    @property
    def warning(self) -> str:
        """A warning that the end of the turn is unknown; "": it is known."""
        if self.end.stop_id is not None or self.end.stop:
            return ""
        if self.frame.tail is None:
            problem = "the end of a turn cannot be derived from the chat template"
        else:
            problem = "the chat template renders no end of a turn, and the tokenizer has no end-of-text token"
        return (
            f"{problem}: answers may not stop; add the end to the chat template, or pass stop strings to chat (--stop)"
        )

    @cached_property
    def _control(self) -> ControlTokens:
        """Special tokens, and further added tokens that the template places around a user's message or after an answer."""
        tail = self.frame.tail or ""
        names = {tail.strip()}
        for name, value in self.template.variables.items():
            if name.endswith("_token") and isinstance(value, str):
                names.add(value)
        added = set[str]()
        if isinstance(self.tokenizer, SubwordTokenizer):
            added = {token.content for token in self.tokenizer.library.get_added_tokens_decoder().values()}
        for name in self.template.answer_tokens:
            if name not in added:
                raise UserError(f"data.answer_tokens: the tokenizer has no special token {short_repr(name)}; remove it")
        around = self.frame.around_user + tail
        return ControlTokens(self.tokenizer, names | {name for name in added if name in around})

    def _sequences(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, is_prompt: bool
    ) -> tuple[list[list[Part]], str]:
        """Render a conversation as sequences of parts; also return the mark of names in messages."""
        view, mark = self._protected(_View(self.template, messages, tools, self.frame.header), is_prompt)
        whole = view.whole(is_prompt)
        if whole.spans:
            return [self._marked_parts(view, whole, is_prompt)], mark
        if messages[0]["role"] == "assistant" and not is_prompt:
            raise UserError("the first message has the role assistant: begin with a user message")
        return self._turns(view, is_prompt), mark

    def _protected(self, view: _View, is_prompt: bool) -> tuple[_View, str]:
        """Mark the names of control tokens in messages and tools (`ControlTokens.protect`).

        Marking the first character of names everywhere is safer than marking names, because a template may join parts of
        names. The safer marks are used unless they change the rendered text.

        Raises:
            UserError: if the template joins parts of names, and the safer marks change the rendered text.
        """
        mark = unused_mark([view.messages, view.tools, self.template.variables, self.template.source])
        beginnings = self._marked(view, mark, self._markup)
        if (beginnings.messages, beginnings.tools) == (view.messages, view.tools):
            return view, ""
        names = self._marked(view, mark, None)
        safer_text = beginnings.whole(is_prompt).text
        text = names.whole(is_prompt).text
        if text.replace(mark, "") == safer_text.replace(mark, ""):
            return beginnings, mark
        if len(self._control.unmarked(text, mark)) > len(self._control.unmarked(safer_text, mark)):
            raise UserError(
                "the chat template joins parts of the messages to a special token: remove them from the messages"
            )
        return names, mark

    def _marked(self, view: _View, mark: str, markup: frozenset[str] | None) -> _View:
        protect = self._control.protect
        messages = []
        for message in view.messages:
            kept = self.template.answer_tokens if message["role"] == "assistant" else ()
            messages.append(protect(message, mark, kept, markup))
        return _View(self.template, messages, protect(view.tools, mark, (), markup), view.header)

    @cached_property
    def _markup(self) -> frozenset[str]:
        """Strings that the template may look for in messages."""
        names = self._control.names.values()
        return frozenset(text for text in self.template.strings if len(text) > 1 and text not in names)

    def _turns(self, view: _View, is_prompt: bool) -> list[list[Part]]:
        """Locate answers without `{% generation %}`: render each of them as the last message."""
        sequences = list[list[Part]]()
        text = None  # text of the last sequence; None: the next answer begins a new sequence
        for n in view.answers():
            prompt = view.prompt(n)
            answer = self._answer(view, n) or self._answer_of_turn(view, n)
            if answer is None and not is_prompt:
                raise _not_located(view, n)
            if answer is None:
                text = None
                continue

            self._continue_last(sequences, text, prompt)
            if view.messages[n].get("weight") == 0:
                answer = [part._replace(is_target=False) for part in answer]
            sequences[-1] += answer
            text = prompt + "".join(part.text for part in answer)

        if is_prompt:
            self._continue_last(sequences, text, view.prompt(len(view.messages)))
        return sequences

    def _continue_last(self, sequences: list[list[Part]], text: str | None, prompt: str) -> None:
        """Continue the last sequence, with the text `text`, to a prompt that begins with it; otherwise, begin a new one."""
        if text is None or not prompt.startswith(text):
            sequences.append([])
            text = ""
        self._continue(sequences[-1], prompt[len(text) :])

    def _continue(self, parts: list[Part], text: str) -> None:
        """Append text that is not a target; if it begins with the end that the last answer adds, this is the end."""
        last = parts[-1] if parts else Part("")
        name = self._added_end
        if last.adds_end and name and text.startswith(name):
            parts[-1] = last._replace(adds_end=False)
            parts.append(Part(name, last.is_target))
            text = text.removeprefix(name)
        parts.append(Part(text))

    @property
    def _added_end(self) -> str:
        """The token that ends an answer because the template renders nothing after the last answer; "": none."""
        return self._control.names.get(self.end.ids[0], "") if self.end.ids else ""

    def _answer(self, view: _View, n: int) -> list[Part] | None:
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

    def _answer_of_turn(self, view: _View, n: int) -> list[Part] | None:
        """Return the parts of message n, rendered without the messages before its user's message; None as in `_answer`.

        A template may change earlier text when an answer is added: Mistral's writes the system message into the last message
        if the user wrote it.
        """
        begin = view.request(n)
        return self._answer(view.since(begin), n - begin) if begin else None

    def _marked_parts(self, view: _View, whole: Rendered, is_prompt: bool) -> list[Part]:
        """Split a conversation at `{% generation %}`; targets begin after the prompt and include the end of the turn."""
        text = view.prompt(len(view.messages)) if is_prompt else whole.text
        targets = [self._without_tail(text, begin, end) for begin, end in whole.spans]
        cuts = {0, len(text)}
        omitted = list[Range]()  # messages with the weight 0
        ends = set[int]()  # indices at which the end of a turn is missing in the text
        for n in view.answers(first=0):
            turn = self._locate(view, n, text)
            message = view.messages[n]
            cuts.add(turn.begin)
            targets = [_within(turn, each) for each in targets]
            if turn.end is None:
                if message.get("weight") == 0 and not is_prompt:
                    omitted.append(_span_of(view, n, whole))
                continue
            if turn.is_marked(targets) or message.get("tool_calls") or not message.get("content"):
                targets.append((turn.end, turn.stop))
                if not self.end.text and turn.stop == turn.end:
                    ends.add(turn.end)
            if message.get("weight") == 0:
                omitted.append((turn.begin, turn.stop))

        if not is_prompt:  # a training sequence ends with its last target
            last = max(end for _, end in targets)
            cuts = {min(cut, last) for cut in cuts}
        return _split(text, cuts, targets, omitted, ends)

    def _locate(self, view: _View, n: int, text: str) -> Turn:
        """Locate message n in the text of a conversation."""
        prompt = view.prompt(n) if n else ""
        begin = len(prompt) if text.startswith(prompt) else 0
        end = self._end_of(view.after(n), text)
        if end is None:
            return Turn(begin, None, begin)
        # A template may render the end between messages, but not after the last one.
        name = self._added_end
        is_rendered = name != "" and text.startswith(name, end)
        return Turn(begin, end, end + len(name if is_rendered else self.end.text))

    def _without_tail(self, text: str, begin: int, end: int) -> Range:
        """Return the range of a marked answer without the text after the end of its turn, which is never generated."""
        tail = self.frame.tail or ""
        if self.end.text and text.endswith(tail, begin, end):
            end += len(self.end.text) - len(tail)
        return begin, end

    def _end_of(self, after: str, text: str) -> int | None:
        """Return the index in `text` of the end of the last turn of `after`; None: not found."""
        tail = self.frame.tail
        if tail is None or not after.endswith(tail):
            return None
        end = len(after) - len(tail)
        return end if text.startswith(after[:end] + self.end.text) else None

    def _encode(self, parts: Sequence[Part], mark: str) -> Conversation:
        ids = list[int]()
        is_target = list[bool]()
        encoded = self._control.encode_parts([part.text for part in parts], mark)
        for part, part_ids in zip(parts, encoded, strict=True):
            end_ids = self.end.ids if part.adds_end else ()
            ids += [*part_ids, *end_ids]
            is_target += [part.is_target] * (len(part_ids) + len(end_ids))
        return Conversation(np.array(ids, np.int32), np.array(is_target, bool))


def _not_located(view: _View, n: int) -> UserError:
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


def _span_of(view: _View, n: int, whole: Rendered) -> Range:
    """Return the marked range of message n, if each answer has one."""
    answers = [*view.answers(first=0)]
    if len(answers) != len(whole.spans):
        raise UserError(
            f"message {n + 1} has the weight 0, but its text cannot be located: the chat template changes earlier text, and "
            f"marks {len(whole.spans)} texts of {len(answers)} answers; mark each answer with {{% generation %}}, or omit "
            f"such records"
        )
    return whole.spans[answers.index(n)]


def _within(turn: Turn, target: Range) -> Range:
    """Return a target without the text before a turn that begins in it, and without the text after the end of this turn.

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


class _View:
    """A conversation, and the texts that a template renders from its first messages."""

    def __init__(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: Sequence[Any] | None, header: str
    ) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.header = header
        self._render = cache(self._rendered)

    def answers(self, first: int = 1) -> Iterator[int]:
        """Yield the indices of the assistant's messages, starting at index `first`."""
        for n in range(first, len(self.messages)):
            if self.messages[n]["role"] == "assistant":
                yield n

    def request(self, n: int) -> int:
        """Return the index of the last user's message before message n; 0: none."""
        users = [index for index in range(n) if self.messages[index]["role"] == "user"]
        return max(users, default=0)

    def since(self, n: int) -> _View:
        """Return the conversation without the first n messages."""
        return _View(self.template, self.messages[n:], self.tools, self.header)

    def whole(self, is_prompt: bool) -> Rendered:
        """Render all messages."""
        return self._render(len(self.messages), is_prompt)

    def prompt(self, n: int) -> str:
        """Return the text that chat sends for message n."""
        return self._render(n, True).text + self.header

    def after(self, n: int) -> str:
        """Return the text of the messages up to and including message n."""
        return self._render(n + 1, False).text

    def _rendered(self, n: int, is_prompt: bool) -> Rendered:
        return self.template.render(self.messages[:n], tools=self.tools, add_generation_prompt=is_prompt)


def encode_messages(
    messages: Sequence[Message], tools: Sequence[Any] | None, tokenizer: Tokenizer, template: ChatTemplate
) -> list[Conversation]:
    """Encode a complete conversation for training: `ChatFormat(template, tokenizer).encode(messages, tools)`.

    Raises:
        UserError: if the messages are malformed or have no assistant message, or cannot be rendered, located or encoded.
    """
    form = _format_of(template, tokenizer)  # type: ignore[arg-type]  # a protocol declares no __hash__
    return form.encode(messages, tools)


def chat_format(
    tokenizer: Tokenizer,
    data: DataConfig,
    variables: Mapping[str, Any] | None = None,
    date: str = "",
    with_tools: bool = False,
) -> ChatFormat | None:
    """Return the format of a model's conversations; None: the model has no chat template for them.

    Args:
        tokenizer: tokenizer of the model, with its special tokens.
        data: `data` settings of the run.
        variables: variables of the template, in addition to `data.chat_template_kwargs`.
        date: date for templates that include it; empty: today.
        with_tools: conversations with tools; some models have a template for them, named tool_use.

    Raises:
        UserError: if a variable is not a JSON value.
    """
    special = tokenizer.special
    source = special.tool_template if with_tools else special.chat_template
    if source is None:
        return None
    given = data.template_variables | check_variables(variables or {})
    values = json.dumps(special.variables | given)
    return _known_format(tokenizer, source, values, date, data.answer_tokens)  # type: ignore[arg-type]  # as above


def stop_ids(tokenizer: Tokenizer, data: DataConfig) -> tuple[int, ...]:
    """Return the ids that end a generated text: the ends of the assistant's turn, if any, then the end-of-text ids."""
    ids = list[int]()
    for with_tools in (False, True):
        form = chat_format(tokenizer, data, with_tools=with_tools)
        if form is not None and form.end.stop_id is not None:
            ids.append(form.end.stop_id)
    return tuple(dict.fromkeys((*ids, *tokenizer.end_ids)))


@lru_cache(maxsize=8)
def _known_format(
    tokenizer: Tokenizer, source: str, values: str, date: str, answer_tokens: tuple[str, ...]
) -> ChatFormat:
    return ChatFormat(ChatTemplate(source, json.loads(values), date, answer_tokens), tokenizer)


@lru_cache(maxsize=8)
def _format_of(template: ChatTemplate, tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat(template, tokenizer)
