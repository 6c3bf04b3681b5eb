"""Preference pairs: a prompt with a chosen and a rejected answer -> ids and targets -> windows.

Both texts are encoded like conversations in fine-tuning: the ids that chat sends, the answer, and the end of the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.chat.encoding import Conversation
from jaxgpt.data.chat.files import find_files
from jaxgpt.data.chat.formats import Formats, formats_of
from jaxgpt.data.chat.records import ChatRecord, Pair
from jaxgpt.data.chat.warnings import OMITTED_MESSAGE
from jaxgpt.data.conversations import encode_conversation
from jaxgpt.data.example_files import DoesNotFit, Loaded, hold_out, read_examples
from jaxgpt.data.example_notes import describe_preferences, notes_on_split, notes_on_templates
from jaxgpt.data.examples import ExampleSplit
from jaxgpt.data.files.records import read_records
from jaxgpt.data.files.skipped import Skipped
from jaxgpt.data.preference_records import PREFERENCE_PAIRS, EqualAnswers, PreferenceRecord, is_preference
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress


class Preference(NamedTuple):
    """An encoded pair: the prompt with the chosen answer, and with the rejected answer. The targets are the answers."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True)
class Preferences(ExampleSplit):
    """Preference pairs as a split; the start of a row is its index."""

    pairs: Sequence[Preference]

    def count(self) -> int:
        """Return the number of pairs."""
        return len(self.pairs)

    def texts(self) -> list[np.ndarray]:
        """Return the ids of each pair's texts: with the chosen answer, then with the rejected answer."""
        return [text.ids for pair in self.pairs for text in pair]

    def windows(self, starts_B: np.ndarray, block_size: int) -> np.ndarray:
        """Read pairs, int32 `[B, 2, T, 3]`: input, target (-1: no target) and document (-1: padding) of both texts.

        Texts of more than T + 1 ids are truncated.
        """
        rows_B2T3 = np.full((len(starts_B), 2, block_size, 3), (0, -1, -1), np.int32)
        for row_2T3, start in zip(rows_B2T3, starts_B.tolist(), strict=True):
            for row_T3, text in zip(row_2T3, self.pairs[start], strict=True):
                ids = text.ids[: block_size + 1]
                n = len(ids) - 1
                row_T3[:n, 0] = ids[:-1]
                row_T3[:n, 1] = np.where(text.is_target[1 : n + 1], ids[1:], -1)
                row_T3[:n, 2] = 0
        return rows_B2T3

    def prompt(self) -> np.ndarray:
        """Return the ids of the first prompt."""
        return prompt_ids(self.pairs[0].chosen)

    def answer(self) -> np.ndarray:
        """Return the ids of the first chosen answer."""
        chosen = self.pairs[0].chosen
        return chosen.ids[chosen.is_target]


def load_preferences(config: Config, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS) -> Loaded[Preferences]:
    """Read, encode and split the preference pairs of `data.path`.

    Raises:
        UserError: if a file cannot be read, or a record is not a preference pair or cannot be compared within a window
            (unless `data.on_error` is skip), or no pair remains for training.
    """
    formats = formats_of(tokenizer, config.data)

    def encode(record: PreferenceRecord) -> Preference:
        pair = encode_preference(record, tokenizer, formats)
        check_fits(pair, config)
        return pair

    def count(skipped: Skipped, where: str, record: PreferenceRecord) -> None:
        for role in formats.omitted_roles(record.chosen):  # both answers have the same prompt
            skipped.warn(OMITTED_MESSAGE, where, role)

    read = read_examples(config.data, PREFERENCE_PAIRS, encode, count, progress)
    split = hold_out(read, config.data.train_fraction, key_of)
    notes = [describe_preferences([*split.train, *split.val], Path(config.data.path), config.window)]
    notes += notes_on_templates(formats)
    notes += notes_on_split(read.files, split, "pairs")
    return Loaded(
        train=Preferences(split.train),
        val=Preferences(split.val),
        note="; ".join(notes) + str(read.skipped),
        fingerprint=read.files.fingerprint,
    )


def encode_preference(record: PreferenceRecord, tokenizer: Tokenizer, formats: Formats) -> Preference:
    """Encode a pair; raise `UserError` if an answer cannot be encoded as the end of one sequence, or the ids are equal."""
    chosen, rejected = (_encode(chat, tokenizer, formats) for chat in record)
    if np.array_equal(chosen.ids, rejected.ids):
        raise EqualAnswers("the chosen and the rejected answer have equal ids: change one, or remove the record")
    return Preference(chosen, rejected)


def _encode(chat: ChatRecord | Pair, tokenizer: Tokenizer, formats: Formats) -> Conversation:
    """Encode one text of a pair; raise `UserError` unless it is a single sequence with a prompt and targets."""
    sequences = encode_conversation(chat, tokenizer, formats.of(chat))
    with_targets = [sequence for sequence in sequences if sequence.is_target.any()]
    if not with_targets:
        raise UserError("all messages of an answer have the weight 0, so nothing is compared: set a weight to 1")
    if len(with_targets) > 1:
        raise UserError(
            f"the answer has targets in {len(with_targets)} sequences, because the chat template changes earlier text: end the "
            "answer after the first assistant message"
        )
    [sequence] = with_targets
    if sequence.is_target[0]:
        raise UserError(
            "the prompt is empty, and the tokenizer has no beginning-of-text token, so nothing predicts the first token of an "
            "answer: write a prompt"
        )
    return sequence


def check_fits(pair: Preference, config: Config) -> None:
    """Raise `UserError` if a window has no room for the answers of a pair, or for a difference between them."""
    size = config.window + 1
    fix = "raise --data.window" if config.window < config.model.block_size else "shorten the texts"
    n = max(len(prompt_ids(text)) for text in pair)
    if n >= size:
        raise DoesNotFit(f"the prompt of {n:,} tokens leaves no room for an answer in {config.window_setting}: {fix}")
    if np.array_equal(pair.chosen.ids[:size], pair.rejected.ids[:size]):
        raise DoesNotFit(f"the answers are equal within the first {size:,} tokens ({config.window_setting}): {fix}")


def prompt_ids(text: Conversation) -> np.ndarray:
    """Return the ids before the first target."""
    return text.ids[: int(np.argmax(text.is_target))]


def key_of(pair: Preference) -> tuple[bytes, bytes]:
    """Return a hashable value that is equal for equal pairs."""
    return pair.chosen.ids.tobytes(), pair.rejected.ids.tobytes()


def are_preferences(path: Path) -> bool:
    """Return whether the first readable record of a path is a preference pair."""
    files = find_files(path)
    for file in (*files.train, *files.val):
        for record in read_records(file, PREFERENCE_PAIRS.fields):
            if not record.error:
                return is_preference(record.value)
    return False
