"""Notes on examples for the line `data` of a run: conversations, preference pairs and prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxgpt.data.chat.encoding import ChatFormat
from jaxgpt.data.chat.files import Files
from jaxgpt.data.chat.formats import Formats
from jaxgpt.data.example_files import Splits
from jaxgpt.data.prompt_records import fields_for_reward
from jaxgpt.errors import plural, short_repr

if TYPE_CHECKING:
    from jaxgpt.data.conversations import Sequences
    from jaxgpt.data.preferences import Preference
    from jaxgpt.data.prompts import Prompt

MIN_HELD_OUT = 20  # minimum number of validation examples for comparing runs


def describe_conversations(conversations: Sequence[Sequences], path: Path) -> str:
    """Describe conversations: their number, the number of answers, and the fraction of predicted ids that are targets."""
    answers = 0
    targets = 0
    predicted = 0
    for _, is_target in itertools.chain(*conversations):
        begins = is_target[1:] & ~is_target[:-1]
        answers += int(begins.sum()) + int(is_target[0])
        targets += int(is_target[1:].sum())
        predicted += len(is_target) - 1
    counts = f"{plural(len(conversations), 'conversation')} with {plural(answers, 'answer')}"
    return f"{counts} in {path}; loss on {targets / predicted:.1%} of the tokens"


def describe_preferences(pairs: Sequence[Preference], path: Path, T: int) -> str:
    """Describe pairs: their number, the lengths of answers, the filled fraction of windows of T ids, and truncated texts."""
    lengths = [len(text.ids) for pair in pairs for text in pair]
    chosen = np.mean([pair.chosen.is_target.sum() for pair in pairs])
    rejected = np.mean([pair.rejected.is_target.sum() for pair in pairs])
    fill = np.minimum(np.array(lengths) - 1, T).sum() / (len(lengths) * T)
    note = (
        f"{plural(len(pairs), 'preference pair')} in {path}; answers of {chosen:.1f} (chosen) and {rejected:.1f} (rejected) "
        f"tokens on average; windows {fill:.1%} full"
    )
    longest = max(lengths) - 1
    if longest <= T // 2:
        note += f" (--data.window {longest} holds all pairs)"
    truncated = sum(length > T + 1 for length in lengths)
    if truncated:
        note += f"; {truncated:,} of {len(lengths):,} texts truncated to {T + 1:,} tokens"
    return note


def notes_on_prompts(prompts: Sequence[Prompt], path: Path, formats: Formats) -> list[str]:
    """Describe prompts: their number and lengths, warnings about their formats, and fields that only the reward sees."""
    lengths = [len(prompt.ids) for prompt in prompts]
    notes = [
        f"{plural(len(lengths), 'prompt')} in {path}, {np.mean(lengths):.1f} tokens on average, at most {max(lengths)}"
    ]
    for form in dict.fromkeys(filter(None, formats)):
        if form.warning:
            notes.append(f"warning: {form.warning}")
    only_for_reward = fields_for_reward(prompt.record for prompt in prompts)
    if only_for_reward:
        notes.append(
            f"only the reward sees {', '.join(only_for_reward)}: write them into the prompt if the model needs them"
        )
    return notes


def notes_on_templates(forms: Sequence[ChatFormat | None]) -> list[str]:
    """Return notes about the text that chat templates add to answers, and the warnings of formats; skip None (no template)."""
    notes = []
    for form in dict.fromkeys(filter(None, forms)):
        if form.added_target:
            notes.append(f"the chat template adds {short_repr(form.added_target)} to answers, a target")
        if form.warning:
            notes.append(f"warning: {form.warning}")
    return notes


def notes_on_split(files: Files, examples: Splits[Any], what: str, measure: str = "loss") -> list[str]:
    """Return notes about unused files and held-out examples.

    Args:
        files: files of the examples, by split.
        examples: the examples by split.
        what: word for the examples in the plural, such as "prompts".
        measure: name of the number for comparing runs.
    """
    notes = []
    if files.unused:
        notes.append(f"{plural(len(files.unused), 'file')} not used, such as {files.unused[0]}")
    if examples.copies:
        notes.append(f"{examples.copies:,} not held out, because they are also among the training {what}")
    held_out = len(examples.val)
    if 0 < held_out < MIN_HELD_OUT:
        notes.append(
            f"{held_out} held out, fewer than {MIN_HELD_OUT}: hold out more to compare runs by their {measure}"
        )
    return notes
