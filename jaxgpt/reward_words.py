"""Words of `post.reward`: the rewards of answers, with their weights.

A single reward is its name. Several rewards are a `NAME=WEIGHT` each, and are added:

    exact=1 json=0.2 my/rewards.py:brief=0.5

A name is a built-in reward, such as `exact`, with or without an argument (`exact:FIELD`), or `FILE.py:FUNCTION`, a function in
a user's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxgpt.errors import short_repr

ANSWER = "answer"  # default field of a record with the expected answer
WITH_ANSWER = ("exact", "number")  # built-in rewards that read the expected answer


def reward_weights(words: Sequence[str]) -> dict[str, float]:
    """Return the weight of each reward, keyed by name; a single reward has the weight 1. `words` must be valid."""
    if len(words) == 1:
        return {words[0]: 1.0}
    return {name: float(weight) for name, weight in map(_name_and_weight, words)}


def weight_errors(words: Sequence[str]) -> Iterator[str]:
    """Yield the errors of several rewards, which need a weight each."""
    if len(words) < 2:
        return
    parts = [_name_and_weight(word) for word in words]
    names = [name for name, _ in parts]
    for word, (name, weight) in zip(words, parts, strict=True):
        is_number = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", weight) is not None
        if not (name and is_number and abs(float(weight)) <= 1e6):
            yield (
                f"several rewards need NAME=WEIGHT each, with a weight from -1e6 to 1e6, as in exact=1 json=0.2: "
                f"{short_repr(word)}"
            )
        if names.count(name) > 1:
            yield f"post.reward lists {name} twice: add up its weights"
    if not any(reward_weights(words).values()):
        yield "all weights of post.reward are 0, so all answers have equal rewards: change one"


def _name_and_weight(word: str) -> tuple[str, str]:
    """Split NAME=WEIGHT; without "=", the name is empty."""
    name, _, weight = word.rpartition("=")
    return name, weight


def answer_fields(names: Iterable[str]) -> dict[str, str]:
    """Return the field with the expected answer, keyed by the name of the built-in reward that reads it."""
    fields = {}
    for name in names:
        kind, _, field = name.partition(":")
        if kind in WITH_ANSWER and not is_own_code(name):
            fields[name] = field or ANSWER
    return fields


def is_own_code(name: str) -> bool:
    """Return whether a reward is a function in a file: `FILE.py:FUNCTION`."""
    path, _, function = name.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def shown_reward(word: str) -> str:
    """Return a word of `post.reward` for display: NAME or NAME=WEIGHT, without the directory of FILE.py."""
    file, _, function = word.rpartition(":")
    if not file.endswith(".py"):
        return word
    return f"{Path(file).name}:{function}"
