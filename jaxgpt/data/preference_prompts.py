"""The prompt of a preference pair: separate it from two answers that begin with it or repeat its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxgpt.data.chat.messages import begins_with, comparable, plain_message

# A prompt or an answer: a text, or a list of messages as in the record.
Content = str | list[Any]


class SeparateParts(NamedTuple):
    """A prompt and two answers that do not repeat it."""

    prompt: Content | None  # None: not found
    chosen: Content
    rejected: Content


def separate(prompt: Content | None, chosen: Content, rejected: Content) -> SeparateParts:
    """Separate the prompt from two different answers, which are both texts or both lists of messages.

    | prompt | texts | lists of messages |
    |---|---|---|
    | None | their common beginning is the prompt | their common first messages are the prompt |
    | text | unchanged | the same; the text is the request if they do not begin with a request |
    | list of messages | unchanged | first messages that repeat the end of the prompt are removed |
    """
    if isinstance(chosen, list) and isinstance(rejected, list):
        if isinstance(prompt, list):
            return _without_repeated(prompt, chosen, rejected)
        return _split_messages(prompt, chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        return _split_texts(chosen, rejected)
    return SeparateParts(prompt, chosen, rejected)


def are_equal(chosen: Content, rejected: Content) -> bool:
    """Return whether two texts are equal, or two lists of messages are equal in the form of templates."""
    return _comparable(chosen) == _comparable(rejected)


def _split_texts(chosen: str, rejected: str) -> SeparateParts:
    """Split two texts as TRL does (`extract_prompt`).

    `It is 4`, `It is 5`: the prompt is `It is`, without the space before the first difference.
    `ab c`, `ab cd`: one text begins with the other, so the shorter answer is its last character: `ab `, then `c` and `cd`.
    """
    n = _shared(chosen, rejected)
    is_continued = n == min(len(chosen), len(rejected))  # one text begins with the other
    if is_continued or chosen[:n].endswith(" "):
        n -= 1
    return SeparateParts(chosen[:n] or None, chosen[n:], rejected[n:])


def _split_messages(request: str | None, chosen: list[Any], rejected: list[Any]) -> SeparateParts:
    """Split two lists after their common first messages; without any, the prompt is `request`."""
    n = _shared(_comparable(chosen), _comparable(rejected))
    if n == 0:
        return SeparateParts(request, chosen, rejected)
    prompt = chosen[:n]
    if request is not None:
        prompt = _with_request(request, prompt)
    return SeparateParts(prompt, chosen[n:], rejected[n:])


def _with_request(request: str, messages: list[Any]) -> list[Any]:
    """Insert a request before the first messages of a conversation, unless they begin with one.

    `[system, assistant]` becomes `[system, user, assistant]`.
    """
    begin = 1 if begins_with(messages, "system") else 0
    if begins_with(messages[begin:], "user"):
        return messages
    return [*messages[:begin], plain_message("user", request), *messages[begin:]]


def _without_repeated(prompt: list[Any], chosen: list[Any], rejected: list[Any]) -> SeparateParts:
    """Remove first messages of both answers that repeat the end of the prompt, such as its last request."""
    asked = _comparable(prompt)
    messages = _comparable(chosen)
    shared = messages[: _shared(messages, _comparable(rejected))]
    repeated = 0
    for n in range(1, min(len(asked), len(shared)) + 1):
        if asked[-n:] == shared[:n]:
            repeated = n
    return SeparateParts(prompt, chosen[repeated:], rejected[repeated:])


def _comparable(content: Content) -> Sequence[Any]:
    """Return the characters of a text, or messages in the form of templates."""
    return content if isinstance(content, str) else [comparable(message) for message in content]


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of equal first items."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
