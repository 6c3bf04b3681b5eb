"""Render conversations with chat templates, and find the text that the assistant wrote."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.errors import UserError, short_repr

SECONDS = 10.0  # of CPU time, for one conversation
WAIT = 120.0  # seconds in all: the limit where a process cannot limit its own CPU time (Windows)
LONGEST = 1 << 26  # bytes of a rendered conversation, as JSON
ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: input for the tokenizer, with special tokens by name.
        spans: ranges `[begin, end)` of characters that the assistant wrote, if the template marks them.
    """

    text: str
    spans: list[Span]


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation: a list of messages with a role and a content, as in chat APIs.

    Raises:
        UserError: it is empty or not a list, or a message has an unknown role or no text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError(
            f'messages must be a list such as [{{"role": "user", "content": "Hi"}}]: {short_repr(messages)}'
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UserError(f"message {number} must have a role and a content: {short_repr(message)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"message {number} has the role {short_repr(role)}: use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"message {number} ({role}) needs a content that is a string: {short_repr(content)}")
    return [dict(message) for message in messages]


class ChatTemplate:
    """A chat template, rendered as transformers' `apply_chat_template` renders it.

    A template is a program. It runs in Jinja2's immutable sandbox, in a child process that can open no files, has 1 GiB of
    memory, and is killed after `SECONDS` of CPU time for one conversation. The process starts at the first call and is reused.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, date: str = "") -> None:
        """Keep the template; it is compiled when it is first used.

        Args:
            source: Jinja2 source.
            variables: other variables of the template: `bos_token`, `eos_token`, ...
            date: the date that the template writes, if it writes one, as `2024-07-26`; empty: today.
        """
        self.source, self.variables, self.date = source, dict(variables or {}), date
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Rendered:
        """Render a conversation.

        Args:
            messages: `[{"role": "user", "content": "Hi"}, ...]`.
            add_generation_prompt: end with the header of an assistant message.

        Raises:
            UserError: the messages are malformed, the template refuses them or has an error, or it takes too long.
        """
        return self._render([(messages, add_generation_prompt)])[0]

    def assistant_spans(self, messages: Sequence[Message]) -> Rendered:
        """Render a whole conversation, and locate the text that the assistant wrote, on which a model is trained.

        If the template has no `{% generation %}`, each prefix of the conversation is rendered: an assistant's message is what
        a prefix that ends with it adds to the prefix before it, whose generation prompt is not part of it. Trailing white
        space is not part of it either.

        Raises:
            UserError: as `render`; or the assistant's text cannot be located, because the template changes earlier messages
                when later ones follow.
        """
        whole = self.render(messages, add_generation_prompt=False)
        if whole.spans:
            return whole
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if 0 in answers:
            raise UserError("the first message has the role assistant: begin with a message of the user")
        befores = self._render([(messages[:number], True) for number in answers])
        afters = self._render([(messages[: number + 1], False) for number in answers])
        spans = []
        for number, (before, _), (after, _) in zip(answers, befores, afters, strict=True):
            if not after.startswith(before) or not whole.text.startswith(after.rstrip()):
                fault = (
                    f"changes message {number + 1} when other messages follow"
                    if after.startswith(before)
                    else f"does not append message {number + 1} to the messages before it and its generation prompt"
                )
                raise UserError(
                    f"the chat template {fault}, so the assistant's text cannot be located; use a template with "
                    f"{{% generation %}}"
                )
            spans.append((len(before), max(len(before), len(after.rstrip()))))  # an empty message may add no text
        return Rendered(whole.text, spans)

    def _render(self, conversations: Sequence[tuple[Sequence[Message], bool]]) -> list[Rendered]:
        """Render several conversations at once, each with or without the header of an assistant message."""
        given = self.variables | {"tools": None, "documents": None}
        variables = [
            given | {"messages": check_messages(messages), "add_generation_prompt": prompt}
            for messages, prompt in conversations
        ]
        rendered = []
        request = {"source": self.source, "variables": variables, "date": self.date, "seconds": SECONDS}
        for answer in self._ask(request):
            if "error" in answer:
                what = "has an error" if answer.get("broken") else "cannot render these messages"
                raise UserError(f"the chat template {what}: {answer['error']}")
            rendered.append(Rendered(answer["text"], [(begin, end) for begin, end in answer["spans"]]))
        return rendered

    def close(self) -> None:
        """Stop the child process."""
        if self._process is not None:
            self._stop()
            self._process = None

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if self._process is None:
            program = Path(__file__).with_name("template_process.py")
            # The isolated process looks for Jinja2 where it is installed here, such as in the user's site-packages.
            found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
            folders = [str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin]
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(program), *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # not interrupted by Ctrl-C
            )
            self._stop = weakref.finalize(self, _stop, self._process)  # also when Python exits
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WAIT, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answers: list[dict[str, Any]] = json.loads(process.stdout.readline(LONGEST))
        except (OSError, ValueError):
            waited = not timer.is_alive()
            self.close()
            spent = process.returncode < 0 and process.returncode == -signal.SIGPROF
            why = f"takes more than {WAIT if waited else SECONDS:g} s" if waited or spent else "crashed its process"
            raise UserError(f"the chat template {why}: use another one") from None
        finally:
            timer.cancel()
        return answers


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
