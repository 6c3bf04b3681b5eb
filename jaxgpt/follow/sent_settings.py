"""Settings of a run as trackers receive them: without the directories of paths.

Any text may be a path, including texts of future settings. By default, a tracker receives only the text after the last slash;
`SHORTENED` has the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.reward_words import shown_reward


def last_name(path: str) -> str:
    """Return the text after the last slash of a path."""
    return path.rstrip("/").rpartition("/")[2]


def _run_and_step(checkpoint: str) -> str:
    """Return RUN/STEP of a checkpoint, or RUN of a run."""
    run, step = parse_checkpoint(checkpoint)
    name = last_name(str(run)) if checkpoint else ""  # the path of an empty text is the current directory
    return f"{name}/{step}" if step.isdecimal() else name


def _source(word: str) -> str:
    """Shorten the path of PATH=WEIGHT, a word of `data.mix`; other words, such as `@TOKENS`, have no path."""
    path, equals, weight = word.rpartition("=")
    return f"{last_name(path)}{equals}{weight}"


# Functions that shorten texts that are not a single path, keyed by dotted name; `str` keeps the text.
SHORTENED: Mapping[str, Callable[[str], str]] = {
    "train.prompt": str,
    "data.answer_tokens": str,
    "data.chat_template_kwargs": str,
    "data.mix": _source,
    "init_from": _run_and_step,
    "state_from": _run_and_step,
    "post.reference": _run_and_step,
    "post.reward": shown_reward,
}


def settings_to_send(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as trackers receive them; `settings`: values keyed by dotted name."""
    sent: dict[str, Any] = {}
    for name, value in settings.items():
        shorten = SHORTENED.get(name, last_name)
        if isinstance(value, str):
            sent[name] = shorten(value)
        elif isinstance(value, list | tuple):
            sent[name] = [shorten(each) if isinstance(each, str) else each for each in value]
        else:
            sent[name] = value
    return sent
