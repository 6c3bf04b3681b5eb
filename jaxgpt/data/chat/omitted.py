"""Find messages, tools and calls of a conversation that a chat template omits.

A template may change a text or a name, for example to capitals. Therefore, a text that is not found in the rendered text counts
as omitted only if a different text renders equally.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxgpt.data.chat.calls import function_names, with_names
from jaxgpt.data.chat.records import ChatRecord
from jaxgpt.data.chat.template import ChatTemplate, Message
from jaxgpt.errors import UserError

OTHER = "Zq7other"  # text that no conversation contains, added to change a text or a name

Functions = Sequence[Mapping[str, Any]]  # tools, or the calls of a message


def omitted_messages(chat: ChatRecord, template: ChatTemplate) -> list[str]:
    """Return the role of each message whose text the template omits, except the assistant's.

    A template may omit the text of some roles, such as system or tool; the model is then trained on answers without this
    text. Conversations with only user and assistant messages are not examined.
    """
    if all(message["role"] in ("user", "assistant") for message in chat.messages):
        return []
    text = _sent_and_trained(template, chat.messages, chat.tools)
    roles = list[str]()
    for n, message in enumerate(chat.messages):
        content = message.get("content", "").strip()
        if message["role"] == "assistant" or content in text:
            continue
        changed = [*chat.messages]
        changed[n] = message | {"content": content + OTHER}
        try:
            is_omitted = _sent_and_trained(template, changed, chat.tools) == text
        except UserError:  # the template needs this text
            continue
        if is_omitted:
            roles.append(message["role"])
    return roles


def omitted_tools(chat: ChatRecord, template: ChatTemplate) -> set[str]:
    """Return the names of the tools that the template omits; tools in the text of a system message are not omitted."""
    names = _omitted_names(chat.tools or [], partial(_rendered, template, chat.messages))
    described = [m.get("content", "") for m in chat.messages if m["role"] in ("system", "developer")]
    return {name for name in names if not any(_has_name(text, name) for text in described)}


def omitted_calls(chat: ChatRecord, template: ChatTemplate) -> set[str]:
    """Return the names of the called functions that the template omits; calls in the content of a message are not omitted."""
    omitted = set[str]()
    for n, message in enumerate(chat.messages):
        names = _omitted_names(message.get("tool_calls", ()), partial(_rendered_to_call, template, chat, n))
        content = message.get("content", "")
        omitted |= {name for name in names if not _has_name(content, name)}
    return omitted


def _omitted_names(functions: Functions, text_with: Callable[[Functions], str]) -> set[str]:
    """Return the names that a template omits; an empty set if it rejects the functions, or other names for them.

    Args:
        functions: tools, or the calls of a message.
        text_with: function of tools or calls that renders the conversation with them.
    """
    names = function_names(functions)
    if not names:
        return set()
    try:
        # `get` occurs in `get_weather`, but the new name of `get` occurs in no other new name.
        text = text_with(with_names(functions, {name: _new_name(name) for name in names}))
        not_found = [name for name in names if _new_name(name) not in text]
        if not not_found:
            return set()
        original = text_with(functions)
        omitted = set[str]()
        for name in not_found:
            if text_with(with_names(functions, {name: _new_name(name)})) == original:
                omitted.add(name)
    except UserError:
        return set()
    return omitted


def _new_name(name: str) -> str:
    """Return a name that no conversation contains."""
    return OTHER + name + OTHER


def _has_name(text: str, name: str) -> bool:
    """Return whether a text has a name as a separate word: `get_weather` does not have the name `get`."""
    # Only ASCII characters continue a name, because Chinese text, for example, has no spaces around a name.
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text, re.ASCII) is not None


def _rendered(template: ChatTemplate, messages: Sequence[Message], tools: Functions | None) -> str:
    """Return the text of a complete conversation."""
    return template.render(messages, tools=tools, add_generation_prompt=False).text


def _rendered_to_call(template: ChatTemplate, chat: ChatRecord, n: int, calls: Functions) -> str:
    """Return the text of a conversation up to and including message n, with other calls in this message."""
    changed = chat.messages[n] | {"tool_calls": calls}
    return _rendered(template, [*chat.messages[:n], changed], chat.tools)


def _sent_and_trained(template: ChatTemplate, messages: Sequence[Message], tools: Functions | None) -> str:
    """Return the text of a conversation, and the text that chat sends before its last answer.

    Templates may render messages in only one of these texts.
    """
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    last = max(answers, default=0)
    prompt = template.render(messages[:last], tools=tools).text if last else ""
    return _rendered(template, messages, tools) + prompt
