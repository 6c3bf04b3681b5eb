"""Find messages, tools and calls of a conversation that a chat template omits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxgpt.data.chat.calls import function_names
from jaxgpt.data.chat.records import ChatRecord
from jaxgpt.data.chat.template import ChatTemplate, Message
from jaxgpt.errors import UserError

OTHER = "Zq7other"  # text that no message contains, appended to change a message


def omitted_messages(chat: ChatRecord, template: ChatTemplate) -> list[str]:
    """Return the role of each message whose text the template omits, except the assistant's.

    A template may omit the text of some roles, such as system or tool; the model is then trained on answers without this
    text. A template may also change a text, for example to capitals. Therefore, a text that is not found counts as omitted
    only if a different text renders equally.
    """
    if all(message["role"] in ("user", "assistant") for message in chat.messages):
        return []
    text = _trained(template, chat.messages, chat.tools)
    roles = list[str]()
    for n, message in enumerate(chat.messages):
        content = message.get("content", "").strip()
        if message["role"] == "assistant" or content in text:
            continue
        changed = [*chat.messages]
        changed[n] = message | {"content": content + OTHER}
        try:
            is_omitted = _trained(template, changed, chat.tools) == text
        except UserError:  # the template needs this text
            continue
        if is_omitted:
            roles.append(message["role"])
    return roles


def omitted_tools(chat: ChatRecord, template: ChatTemplate) -> set[str]:
    """Return the names of the tools that the template omits; tools in the text of a system message are not omitted."""
    if not chat.tools:
        return set()
    text = _rendered(template, chat.messages, chat.tools)
    try:
        without = _rendered(template, chat.messages, None)
    except UserError:  # the template needs the tools of calls
        without = ""
    written = "".join(message["content"] for message in chat.messages if message["role"] in ("system", "developer"))
    omitted = set[str]()
    for name in function_names(chat.tools):
        is_rendered = text.count(name) > without.count(name)
        if not is_rendered and name not in written:
            omitted.add(name)
    return omitted


def omitted_calls(chat: ChatRecord, template: ChatTemplate) -> set[str]:
    """Return the names of the called functions that the template omits in the text of their messages."""
    omitted = set[str]()
    for n, message in enumerate(chat.messages):
        names = function_names(message.get("tool_calls", ()))
        if not names:
            continue
        before = template.render(chat.messages[:n], tools=chat.tools).text if n else ""
        after = _rendered(template, chat.messages[: n + 1], chat.tools)
        added = _added(before, after)
        omitted |= {name for name in names if name not in added}
    return omitted


def _added(before: str, after: str) -> str:
    """Return the text of `after` from the first character that differs from `before`."""
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            return after[index:]
    return after[len(before) :]


def _rendered(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """Return the text of a complete conversation."""
    return template.render(messages, tools=tools, add_generation_prompt=False).text


def _trained(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """Return the text of a conversation, and the text that chat sends before its last answer.

    Templates may render messages in only one of these texts.
    """
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    last = max(answers, default=0)
    prompt = template.render(messages[:last], tools=tools).text if last else ""
    return _rendered(template, messages, tools) + prompt
