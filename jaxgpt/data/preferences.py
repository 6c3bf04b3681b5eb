"""Preference pairs: records of a prompt with a chosen and a rejected answer -> ids and targets -> windows.

Both texts are encoded like conversations in fine-tuning: the ids that chat sends, the answer, and the end of the turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.chat_encoding import Conversation
from jaxgpt.data.chat_files import Skipped, find_files, has_usable, read_files
from jaxgpt.data.chat_records import (
    ANSWERED,
    BESIDE,
    HISTORY,
    LISTS,
    MEDIA_FIELDS,
    SYSTEM,
    TOOLS,
    ChatRecord,
    NoPlace,
    Pair,
    UnusableRecord,
    decoded,
    is_speaker,
    read_record,
)
from jaxgpt.data.conversations import Templates, encode_conversation, omitted_messages, templates_of
from jaxgpt.data.examples import ExampleSplit, encoded, hold_out, notes_on_split, notes_on_templates
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError, plural, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress

CHOSEN, REJECTED = "chosen", "rejected"
# Names of the prompt, and the name of the answer in a conversation of the same shape.
PROMPTS = {"prompt": "completion", "instruction": "output", "question": "answer", "query": "response"}
WITH_PROMPT = (*SYSTEM, *TOOLS, *BESIDE, HISTORY, *MEDIA_FIELDS)  # fields that belong to the prompt
FIELDS = frozenset({CHOSEN, REJECTED, *PROMPTS, *LISTS, *WITH_PROMPT})
EXAMPLE = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}'


class EmptyAnswer(UnusableRecord):
    """The error for a pair with an answer without text."""

    reason = "with an empty answer"


class EqualAnswers(UnusableRecord):
    """The error for a pair with nothing to prefer."""

    reason = "with equal answers"


class PreferenceRecord(NamedTuple):
    """A prompt with each of its two answers, in the form of conversations."""

    chosen: ChatRecord | Pair
    rejected: ChatRecord | Pair


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
        """Return the ids of each pair's texts: the chosen and the rejected one."""
        return [text.ids for pair in self.pairs for text in pair]

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read pairs, int32 `[B, 2, T, 3]`: input, target (-1: no target) and document (-1: padding) of both texts.

        Texts of more than T + 1 ids are truncated.
        """
        rows_B2T3 = np.full((len(starts), 2, block_size, 3), (0, -1, -1), np.int32)
        for row_2T3, start in zip(rows_B2T3, starts.tolist(), strict=True):
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


class LoadedPreferences(NamedTuple):
    """The preference pairs of `data.path`; fields as in `conversations.Loaded`."""

    train: Preferences
    val: Preferences
    note: str
    fingerprint: str


def read_preference(record: Any) -> PreferenceRecord:
    """Turn a record into a prompt with two answers.

    The answers are two texts or two lists of messages. Without a prompt, the prompt is the common beginning of both, as in TRL:
    equal first messages, or equal first characters without a space at the end. Answers that are complete conversations may
    repeat the prompt.

    Raises:
        UserError: if the record has an unknown shape or an empty answer, or both answers are equal.
    """
    if not isinstance(record, dict):
        raise UserError(f"a preference pair must be an object, not {short_repr(record)}: write {EXAMPLE}")
    fields = {name: value for name, value in record.items() if value is not None}
    missing = [name for name in (CHOSEN, REJECTED) if name not in fields]
    if missing:
        raise UserError(
            f"no {' and no '.join(missing)} answer: the fields are {short_repr([*record])}; write {EXAMPLE}"
        )

    parts = _split_prompt(fields, *_answers(fields))
    for answer, which in ((parts.chosen, CHOSEN), (parts.rejected, REJECTED)):
        if not answer or _is_blank(answer):
            raise EmptyAnswer(f"the {which} answer is empty: write an answer, or remove the record")
    if parts.chosen == parts.rejected:
        raise EqualAnswers("the chosen and the rejected answer are equal: change one, or remove the record")

    others = {key: fields[key] for key in WITH_PROMPT if key in fields}
    answered = PROMPTS[parts.field]
    return PreferenceRecord(
        read_record({parts.field: parts.prompt, answered: parts.chosen, **others}),
        read_record({parts.field: parts.prompt, answered: parts.rejected, **others}),
    )


def _answers(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the chosen and the rejected answer: two texts, or two lists of messages."""
    chosen = _messages_or_text(fields[CHOSEN], CHOSEN)
    rejected = _messages_or_text(fields[REJECTED], REJECTED)
    if _is_json_of_messages(chosen) and _is_json_of_messages(rejected):
        chosen = decoded(chosen, CHOSEN)
        rejected = decoded(rejected, REJECTED)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("one answer is a text, and the other a list of messages: write both in the same form")
    return chosen, rejected


class _Parts(NamedTuple):
    """A prompt and two answers that do not repeat it."""

    field: str  # name of the prompt's field, a key of `PROMPTS`
    prompt: Any  # a text, or a list of messages
    chosen: Any
    rejected: Any


def _split_prompt(fields: Mapping[str, Any], chosen: Any, rejected: Any) -> _Parts:
    """Return the prompt of a record, from its field or the common beginning of its answers, and the remaining answers."""
    name, prompt = _prompt(fields)
    if isinstance(prompt, list) and is_speaker(prompt[-1:], "assistant"):
        raise UserError(ANSWERED)

    # The prompt of two texts is their common beginning. Two lists of messages may begin with the prompt, or repeat its end.
    if isinstance(chosen, str):
        if prompt is None:
            name = "prompt"
            prompt, chosen, rejected = _split_texts(chosen, rejected)
    else:
        shared = _shared(chosen, rejected)
        if isinstance(prompt, list):
            shared = _repeated(prompt, chosen[:shared])
        elif shared:
            name = "prompt"
            prompt = _with_request(chosen[:shared], prompt)
        chosen = chosen[shared:]
        rejected = rejected[shared:]

    if prompt is None:
        raise UserError(f"the answers have no common beginning, and the record has no prompt: write {EXAMPLE}")
    return _Parts(name, prompt, chosen, rejected)


def _messages_or_text(answer: Any, which: str) -> Any:
    """Return an answer as a text or a list of messages; a single message becomes a list."""
    if isinstance(answer, dict):
        answer = [answer]
    if not isinstance(answer, str | list):
        raise UserError(f"the {which} answer must be a text or a list of messages, not {short_repr(answer)}")
    return answer


def _is_json_of_messages(answer: Any) -> bool:
    """Return whether an answer is a text with the JSON of a list of messages, as some tables store them."""
    if not isinstance(answer, str) or not answer.lstrip().startswith("["):
        return False
    try:
        found = decoded(answer, "an answer")
    except UserError:
        return False
    are_messages = [isinstance(each, dict) and ("role" in each or "from" in each) for each in found]
    return bool(found) and all(are_messages)


def _is_blank(answer: Any) -> bool:
    """Return whether an answer is a single message without text and calls."""
    match answer:
        case [{**message}]:
            return not any(message.get(name) for name in ("content", "value", "tool_calls", "function_call"))
    return False


def _prompt(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of the prompt's field and the prompt; None: the record has no field for it."""
    for name in PROMPTS:
        if name in fields:
            return name, fields[name]
    for name in LISTS:
        if name in fields:
            return "prompt", decoded(fields[name], f"the field {name!r}")
    return "prompt", None


def _split_texts(chosen: str, rejected: str) -> tuple[str | None, str, str]:
    """Split two texts at their first difference, and before a space there; no prompt: they begin differently.

    If one text begins with the other, the shorter answer is its last character, as in TRL.
    """
    n = _shared(chosen, rejected)
    if n == min(len(chosen), len(rejected)) < max(len(chosen), len(rejected)):
        n -= 1
    if n > 0 and chosen[n - 1] == " ":
        n -= 1
    return chosen[:n] or None, chosen[n:], rejected[n:]


def _repeated(prompt: Sequence[Any], messages: Sequence[Any]) -> int:
    """Return how many of the first messages of an answer repeat the end of the prompt, such as its last request."""
    lengths = range(min(len(prompt), len(messages)), 0, -1)
    return next((n for n in lengths if prompt[-n:] == messages[:n]), 0)


def _with_request(messages: Sequence[Any], prompt: Any) -> list[Any]:
    """Return the first messages of a conversation; a text is their request if they do not begin with one."""
    begin = 1 if is_speaker(messages, "system") else 0
    if not isinstance(prompt, str) or is_speaker(messages[begin:], "user"):
        return [*messages]
    return [*messages[:begin], {"role": "user", "content": prompt}, *messages[begin:]]


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of equal first items."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def check_preferences(path: Path, on_error: str = "fail") -> None:
    """Check that the records of a path are preference pairs, without a tokenizer and a chat template.

    Raises:
        UserError: if a record is not a preference pair; with `on_error` skip: if all records are not.
    """
    skipped = Skipped(on_error)
    if not has_usable(path, skipped, read_preference, FIELDS, all_records=on_error != "skip"):
        raise no_preferences(path, skipped)


def no_preferences(path: Path, skipped: Skipped) -> UserError:
    """Return the error for a path without usable records."""
    return UserError(f"{path} has no preference pairs{skipped}; write one per line, as {EXAMPLE}")


def load_preferences(config: Config, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS) -> LoadedPreferences:
    """Read, encode and split the preference pairs of `data.path`. Answers beyond T + 1 ids are truncated.

    Raises:
        UserError: if a file cannot be read, a record is not a preference pair or cannot be compared within a window (unless
            `data.on_error` is skip), or no pair remains.
    """
    path = Path(config.data.path)
    forms, templates = templates_of(tokenizer, config.data)
    files = find_files(path)
    skipped = Skipped(config.data.on_error)

    def encode(record: PreferenceRecord) -> Preference:
        """Return a pair that can be compared within a window."""
        pair = encode_preference(record, tokenizer, templates)
        check_fits(pair, config)
        return pair

    def omitted(record: PreferenceRecord) -> list[str]:
        """Return the roles of messages that the template omits; both answers have the same prompt."""
        template = templates.of(record.chosen)
        if isinstance(record.chosen, Pair) or template is None:
            return []
        return omitted_messages(record.chosen, template)

    def read(paths: Sequence[Path]) -> list[Preference]:
        return encoded(read_files(paths, skipped, read_preference, FIELDS, progress), skipped, encode, omitted)

    train = read(files.train)
    val = read(files.val)
    if not train:
        raise no_preferences(path, skipped)
    train, held_out, copies = hold_out(train, val, files, config.data.train_fraction, key_of)
    notes = [_described([*train, *held_out], path, config)]
    notes += notes_on_templates(forms)
    notes += notes_on_split(files, copies, len(held_out), "pairs")
    return LoadedPreferences(
        Preferences(train), Preferences(held_out), "; ".join(notes) + str(skipped), files.fingerprint
    )


def encode_preference(record: PreferenceRecord, tokenizer: Tokenizer, templates: Templates) -> Preference:
    """Encode a pair; raise `UserError` if an answer cannot be encoded as the end of one sequence, or the ids are equal."""
    chosen, rejected = (_encode(chat, tokenizer, templates) for chat in record)
    if np.array_equal(chosen.ids, rejected.ids):
        raise EqualAnswers("the chosen and the rejected answer have equal ids: change one, or remove the record")
    return Preference(chosen, rejected)


def _encode(chat: ChatRecord | Pair, tokenizer: Tokenizer, templates: Templates) -> Conversation:
    sequences = encode_conversation(chat, tokenizer, templates.of(chat))
    with_targets = [each for each in sequences if each.is_target.any()]
    if not with_targets:
        raise UserError("no message of an answer is a target: all have the weight 0, so nothing is compared")
    if len(with_targets) > 1:
        raise UserError(
            f"the answer has targets in {len(with_targets)} sequences, because the chat template changes earlier text: end the "
            f"answer after the first assistant message"
        )
    [sequence] = with_targets
    if sequence.is_target[0]:
        raise UserError(
            "the prompt is empty, and the tokenizer has no beginning-of-text token, so nothing predicts the first token of an "
            "answer: write a prompt"
        )
    return sequence


def check_fits(pair: Preference, config: Config) -> None:
    """Raise `UserError` if a window holds no answer of a pair, or no difference between the answers."""
    size = config.window + 1
    fix = "raise --data.window" if config.window < config.model.block_size else "shorten the texts"
    prompt = max(len(prompt_ids(text)) for text in pair)
    if prompt >= size:
        raise NoPlace(
            f"the prompt of {prompt:,} tokens leaves no place for an answer in {config.window_setting}: {fix}"
        )
    if np.array_equal(pair.chosen.ids[:size], pair.rejected.ids[:size]):
        raise NoPlace(f"the answers are equal within the first {size:,} tokens ({config.window_setting}): {fix}")


def prompt_ids(text: Conversation) -> np.ndarray:
    """Return the ids before the first target."""
    return text.ids[: int(np.argmax(text.is_target))]


def key_of(pair: Preference) -> tuple[bytes, bytes]:
    """Return a hashable value that is equal for equal pairs."""
    return pair.chosen.ids.tobytes(), pair.rejected.ids.tobytes()


def _described(pairs: Sequence[Preference], path: Path, config: Config) -> str:
    """Describe pairs: their number, the lengths of their answers and prompts, and the filled part of the windows."""
    T = config.window
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


def are_preferences(path: Path) -> bool:
    """Return whether the first readable record of a path is a preference pair."""
    files = find_files(path)
    for _, is_pair in read_files([*files.train, *files.val], Skipped("skip"), _is_pair, FIELDS):
        return is_pair
    return False


def _is_pair(record: Any) -> bool:
    return isinstance(record, dict) and {CHOSEN, REJECTED} <= record.keys()
