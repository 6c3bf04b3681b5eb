"""Prompts for rollouts: records with a prompt and any other fields -> the ids that chat sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.chat_encoding import ChatFormat, stop_ids
from jaxgpt.data.chat_files import find_files, read_files
from jaxgpt.data.chat_records import ChatRecord, NoPlace, UnusableRecord
from jaxgpt.data.conversations import templates_of
from jaxgpt.data.examples import ExampleSplit, encoded, hold_out, notes_on_split
from jaxgpt.data.omitted import omitted_messages
from jaxgpt.data.prompt_records import ALL, PromptRecord, fields_for_reward, no_prompts, read_prompt
from jaxgpt.data.skipped import Skipped
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError, plural, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress


class NoAnswer(UnusableRecord):
    """The error for a record without the expected answer that a reward reads."""

    reason = "without the expected answer"


class Prompt(NamedTuple):
    """An encoded prompt; the fields `prompt` and `record` as in `PromptRecord`."""

    ids: list[int]
    prompt: Any
    record: Mapping[str, Any]


@dataclass(frozen=True)
class PromptSplit(ExampleSplit):
    """Prompts as a split; the start of a row is its index. Windows have no targets: rollouts add the answers."""

    prompts: Sequence[Prompt]

    def count(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    def texts(self) -> list[list[int]]:
        """Return the ids of each prompt."""
        return [prompt.ids for prompt in self.prompts]

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read prompts, int32 `[B, T, 3]`: input, no target (-1), and document (-1: padding)."""
        rows_BT3 = np.full((len(starts), block_size, 3), (0, -1, -1), np.int32)
        for row_T3, start in zip(rows_BT3, starts.tolist(), strict=True):
            ids = self.prompts[start].ids[:block_size]
            row_T3[: len(ids), 0] = ids
            row_T3[: len(ids), 2] = 0
        return rows_BT3

    def prompt(self) -> np.ndarray:
        """Return the ids of the first prompt."""
        return np.array(self.prompts[0].ids, np.int32)

    def answer(self) -> np.ndarray:
        """Return no ids: the data have no answers."""
        return np.zeros(0, np.int32)


class LoadedPrompts(NamedTuple):
    """The prompts of `data.path`; fields as in `conversations.Loaded`."""

    train: PromptSplit
    val: PromptSplit
    note: str
    fingerprint: str


def load_prompts(config: Config, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS) -> LoadedPrompts:
    """Read, encode and split the prompts of `data.path`.

    Raises:
        UserError: if a file cannot be read, a record has no prompt, leaves no room for `post.max_new_tokens` in a window, or
            lacks the expected answer of a built-in reward (unless `data.on_error` is skip), or no prompt remains.
    """
    path = Path(config.data.path)
    forms, _ = templates_of(tokenizer, config.data)
    files = find_files(path)
    skipped = Skipped(config.data.on_error)

    def encode(record: PromptRecord) -> Prompt:
        """Encode a prompt; raise `UserError` if it leaves no room for an answer, or lacks a field of a built-in reward."""
        check_answer(record.record, config)
        ids = encode_prompt_record(record, tokenizer, forms)
        check_place(ids, config)
        return Prompt(ids, record.prompt, record.record)

    def omitted(record: PromptRecord) -> list[str]:
        """Return the roles of messages that the template omits."""
        form = form_of(record, forms)
        if isinstance(record.chat, str) or form is None:
            return []
        return omitted_messages(record.chat, form.template)

    def read(paths: Sequence[Path]) -> list[Prompt]:
        return encoded(read_files(paths, skipped, read_prompt, ALL, progress), skipped, encode, omitted)

    train = read(files.train)
    val = read(files.val)
    if not train:
        raise no_prompts(path, skipped)
    train, held_out, copies = hold_out(train, val, files, config.data.train_fraction, lambda prompt: tuple(prompt.ids))

    notes = _notes_on_prompts([*train, *held_out], path, forms)
    if not stop_ids(tokenizer, config.data):
        notes.append(without_end(config))
    notes += notes_on_split(files, copies, len(held_out), "prompts", "reward")
    return LoadedPrompts(PromptSplit(train), PromptSplit(held_out), "; ".join(notes) + str(skipped), files.fingerprint)


def _notes_on_prompts(prompts: Sequence[Prompt], path: Path, forms: Sequence[ChatFormat | None]) -> list[str]:
    """Describe prompts: their number and lengths, warnings of their formats, and fields that only the reward sees."""
    lengths = [len(prompt.ids) for prompt in prompts]
    notes = [
        f"{plural(len(lengths), 'prompt')} in {path}, {np.mean(lengths):.1f} tokens on average, at most {max(lengths)}"
    ]
    for form in dict.fromkeys(filter(None, forms)):
        if form.warning:
            notes.append(f"warning: {form.warning}")
    left = fields_for_reward(prompt.record for prompt in prompts)
    if left:
        notes.append(f"only the reward sees {', '.join(left)}: write them into the prompt if the model needs them")
    return notes


def without_end(config: Config) -> str:
    """Return a note for a tokenizer without a token that ends an answer; raise `UserError` if a setting needs an end."""
    post = config.post
    if post.mask_truncated or post.overlong_tokens:
        name = "mask_truncated" if post.mask_truncated else "overlong_tokens"
        raise UserError(
            f"post.{name} needs answers that end, but the tokenizer has no end-of-text token: omit it, or use a model with "
            f"this token"
        )
    other = "a reward that reads only the beginning, or " if post.has_rewards else ""
    return (
        f"no token ends an answer, so all answers have {post.max_new_tokens} tokens (--post.max-new-tokens): use {other}"
        "a model with an end-of-text token"
    )


def form_of(record: PromptRecord, forms: Sequence[ChatFormat | None]) -> ChatFormat | None:
    """Return the format for a prompt, with or without tools; None: no template."""
    plain, with_tools = forms
    has_tools = isinstance(record.chat, ChatRecord) and record.chat.tools is not None
    return with_tools if has_tools else plain


def encode_prompt_record(record: PromptRecord, tokenizer: Tokenizer, forms: Sequence[ChatFormat | None]) -> list[int]:
    """Return the ids that chat sends for a prompt; without a chat template, the ids of a text, as in `jaxgpt sample`.

    Raises:
        UserError: if messages have no template, the template or tokenizer rejects the prompt, or the prompt has no ids.
    """
    chat = record.chat
    form = form_of(record, forms)
    if form is None and isinstance(chat, str):
        ids = tokenizer.after_bos(tokenizer.encode(chat).tolist())
    elif form is None:
        raise UserError("messages need a chat template, which the model lacks: use a prompt (a string)")
    elif isinstance(chat, str):
        ids = form.prompt_ids([{"role": "user", "content": chat}])
    else:
        ids = form.prompt_ids(chat.messages, chat.tools)
    if not ids:
        raise UserError("the prompt has no tokens: write a longer one")
    return ids


def check_answer(record: Mapping[str, Any], config: Config) -> None:
    """Raise `UserError` if a record lacks the expected answer that a built-in reward of the run reads."""
    for name, field in config.post.answer_fields.items():
        if field not in record:
            kind, _, _ = name.partition(":")
            raise NoAnswer(
                f"no field {field!r} with the expected answer of the reward {name}: the fields are {short_repr([*record])}; "
                f"add it, or choose a field with --post.reward {kind}:FIELD"
            )


def check_place(ids: Sequence[int], config: Config) -> None:
    """Raise `UserError` if a window has no room for a prompt and an answer of `post.max_new_tokens`."""
    needed = len(ids) + config.post.max_new_tokens
    fix = "raise --data.window, " if config.window < config.model.block_size else ""
    if needed > config.window + 1:
        raise NoPlace(
            f"the prompt of {len(ids):,} tokens and {config.post.max_new_tokens:,} new tokens exceed {config.window_setting}: "
            f"{fix}lower --post.max-new-tokens, or shorten the prompt"
        )
