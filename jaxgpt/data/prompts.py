"""Prompts for rollouts: records with a prompt and any other fields -> the ids that chat sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.chat.encoding import ChatFormat, stop_ids
from jaxgpt.data.chat.formats import formats_of
from jaxgpt.data.chat.messages import plain_message
from jaxgpt.data.chat.records import ChatRecord
from jaxgpt.data.chat.warnings import OMITTED_MESSAGE
from jaxgpt.data.example_files import DoesNotFit, Loaded, hold_out, read_examples
from jaxgpt.data.example_notes import notes_on_prompts, notes_on_split
from jaxgpt.data.examples import ExampleSplit
from jaxgpt.data.files.skipped import Skipped, UnusableRecord
from jaxgpt.data.prompt_records import PROMPTS, PromptRecord
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError, short_repr
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

    def windows(self, starts_B: np.ndarray, block_size: int) -> np.ndarray:
        """Read prompts, int32 `[B, T, 3]`: input, no target (-1), and document (-1: padding)."""
        rows_BT3 = np.full((len(starts_B), block_size, 3), (0, -1, -1), np.int32)
        for row_T3, start in zip(rows_BT3, starts_B.tolist(), strict=True):
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


def load_prompts(config: Config, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS) -> Loaded[PromptSplit]:
    """Read, encode and split the prompts of `data.path`.

    Raises:
        UserError: if a file cannot be read, or a record has no valid prompt, leaves no room for `post.max_new_tokens` in a
            window, or lacks the expected answer of a built-in reward (unless `data.on_error` is skip); if no prompt remains for
            training; or if a setting of `post` needs a token that ends answers, which the tokenizer lacks.
    """
    formats = formats_of(tokenizer, config.data)

    def encode(record: PromptRecord) -> Prompt:
        for reward, field in config.post.answer_fields.items():
            expected_answer(record.record, reward, field)  # raises an error without an expected answer
        ids = encode_prompt(record.chat, tokenizer, formats.of(record.chat))
        check_fits(ids, config)
        return Prompt(ids, record.prompt, record.record)

    def count(skipped: Skipped, where: str, record: PromptRecord) -> None:
        for role in formats.omitted_roles(record.chat):
            skipped.warn(OMITTED_MESSAGE, where, role)

    read = read_examples(config.data, PROMPTS, encode, count, progress)
    split = hold_out(read, config.data.train_fraction, lambda prompt: tuple(prompt.ids))
    notes = notes_on_prompts([*split.train, *split.val], Path(config.data.path), formats)
    if not stop_ids(tokenizer, config.data):
        check_without_end(config)
        notes.append(note_without_end(config))
    notes += notes_on_split(read.files, split, "prompts", "reward")
    return Loaded(
        train=PromptSplit(split.train),
        val=PromptSplit(split.val),
        note="; ".join(notes) + str(read.skipped),
        fingerprint=read.files.fingerprint,
    )


def check_without_end(config: Config) -> None:
    """Raise `UserError` if a setting needs a token that ends an answer, which the tokenizer lacks."""
    post = config.post
    if post.mask_truncated or post.overlong_tokens:
        name = "mask_truncated" if post.mask_truncated else "overlong_tokens"
        raise UserError(
            f"post.{name} needs answers that end, but the tokenizer has no end-of-text token: omit it, or use a model with "
            "this token"
        )


def note_without_end(config: Config) -> str:
    """Return a note for a tokenizer without a token that ends an answer."""
    other = "a reward that reads only the beginning, or " if config.post.has_rewards else ""
    return (
        f"no token ends an answer, so all answers have {config.post.max_new_tokens} tokens (--post.max-new-tokens): use {other}"
        "a model with an end-of-text token"
    )


def encode_prompt(chat: ChatRecord | str, tokenizer: Tokenizer, form: ChatFormat | None) -> list[int]:
    """Return the ids that chat sends for a prompt; without a chat template, the ids of a text, as in `jaxgpt sample`.

    Args:
        chat: messages before an answer, or a text.
        tokenizer: tokenizer of the model.
        form: format of the model's conversations, with the same tokenizer; None: the model has no chat template.

    Raises:
        UserError: if messages have no template, the template or tokenizer rejects the prompt, or the prompt has no ids.
    """
    if isinstance(chat, ChatRecord):
        if form is None:
            raise UserError("messages need a chat template, which the model lacks: use a prompt (a string)")
        ids = form.prompt_ids(chat.messages, chat.tools)
    elif form is None:
        ids = tokenizer.after_bos(tokenizer.encode(chat).tolist())
    else:
        ids = form.prompt_ids([plain_message("user", chat)])
    if not ids:
        raise UserError("the prompt has no tokens: write a longer prompt")
    return ids


def expected_answer(record: Mapping[str, Any], reward: str, field: str) -> str:
    """Return the expected answer of a record, in the field that a built-in reward reads.

    Raises:
        NoAnswer: if the record lacks the field, or its value is neither a text nor a number, for example, null or NaN.
    """
    kind, _, _ = reward.partition(":")
    choose = f"choose a field with --post.reward {kind}:FIELD"
    if field not in record:
        raise NoAnswer(
            f"no field {field!r} with the expected answer of the reward {reward}: the fields are {short_repr([*record])}; "
            f"add it, or {choose}"
        )
    value = record[field]
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan or isinstance(value, (bool, list, dict, bytes)):
        raise NoAnswer(
            f"the field {field!r} with the expected answer must be a text or a number: {short_repr(value)}; correct the "
            f"record, or {choose}"
        )
    return str(value)


def check_fits(ids: Sequence[int], config: Config) -> None:
    """Raise `UserError` if a window has no room for a prompt and an answer of `post.max_new_tokens` tokens."""
    needed = len(ids) + config.post.max_new_tokens
    fix = "raise --data.window, " if config.window < config.model.block_size else ""
    if needed > config.window + 1:
        raise DoesNotFit(
            f"the prompt of {len(ids):,} tokens and {config.post.max_new_tokens:,} new tokens exceed {config.window_setting}: "
            f"{fix}lower --post.max-new-tokens, or shorten the prompt"
        )
