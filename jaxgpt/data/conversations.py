"""Conversations for fine-tuning: files of records -> ids and a mask of the assistant's ids -> windows."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.chat_records import EXAMPLE, FIELDS, Chat, Pair, read_record
from jaxgpt.data.chat_template import ChatTemplate, Message
from jaxgpt.data.packing import Packed
from jaxgpt.data.records import read_records
from jaxgpt.data.text import Progress, no_progress, visible_files
from jaxgpt.data.tokenizer import Tokenizer, encode_spans
from jaxgpt.data.tokens import Tokens, split_of
from jaxgpt.errors import UserError, plural
from jaxgpt.files import holds_records, sha256_file

DATE = "2024-07-26"  # date for templates that include it, fixed for deterministic encoding
MIN_HELD_OUT = 20  # minimum number of validation conversations for comparing runs by their loss


class Conversation(NamedTuple):
    """An encoded conversation."""

    ids: np.ndarray  # int32
    is_target: np.ndarray  # bool; True for ids of the assistant's text, or of a completion and its end-of-text id


class Files(NamedTuple):
    """The files of conversations at a path."""

    train: list[Path]
    val: list[Path]  # empty: a fraction of `train` is held out
    unused: list[Path]  # neither for training nor for validation, such as test files

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the only file; of several files, the SHA-256 of theirs."""
        sums = [sha256_file(path) for path in (*self.train, *self.val)]
        return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()


class Skipped:
    """Records that cannot be used: an error or, with `data.on_error` skip, counts by reason."""

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self._first = dict[str, str]()  # the first such record, keyed by reason
        self._counts = dict[str, int]()

    def add(self, reason: str, where: str, error: str) -> None:
        """Count a record; raise `UserError` if records are not skipped."""
        if self._on_error == "fail":
            raise UserError(f"{where}: {error}; to skip such records, use --data.on-error skip")
        self._first.setdefault(reason, f"{where}: {error}")
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def __str__(self) -> str:
        """Return the counts, and the first record of each reason; "" if no record was skipped."""
        if not self._counts:
            return ""
        parts = [f"{count:,} {reason} (first: {self._first[reason]})" for reason, count in self._counts.items()]
        return f"; skipped {plural(sum(self._counts.values()), 'record')}: {', '.join(parts)}"


def load_conversations(
    config: Config, tokenizer: Tokenizer, progress: Progress = no_progress
) -> tuple[Packed, Packed, str, str]:
    """Read, encode, split and pack the conversations of `data.path`.

    Conversations of more than T + 1 ids are truncated; conversations without assistant tokens are then dropped.

    Returns:
        Training data; validation data, which may be empty; a one-line description; and the SHA-256 of the files.

    Raises:
        UserError: if a file cannot be read, a record is not a conversation (unless `data.on_error` is skip), or no
            conversation remains.
    """
    path, size = Path(config.data.path), config.window + 1
    source = tokenizer.special.chat_template
    template = ChatTemplate(source, tokenizer.special.names, DATE) if source else None
    files = find_files(path)
    skipped = Skipped(config.data.on_error)

    read_train = read_conversations(files.train, tokenizer, template, skipped, progress)
    read_val = read_conversations(files.val, tokenizer, template, skipped, progress)
    read = [*read_train, *read_val]
    if not read:
        raise _no_conversations(path, skipped)

    train = [kept for sequences in read_train if (kept := _truncated(sequences, size))]
    val = [kept for sequences in read_val if (kept := _truncated(sequences, size))]
    if not train:
        flag = "--" + config.window_setting.split()[0].replace("_", "-")
        raise UserError(
            f"no conversation of {path} has assistant tokens among its first {size:,} ({config.window_setting}): raise {flag}"
        )
    dropped = len(read) - len(train) - len(val)
    if not files.val:
        n = max(int(config.data.train_fraction * len(train)), 1)
        val = train[n:]
        train = train[:n]
    held_out = _without_copies(val, train)

    packed = pack_conversations(itertools.chain(*train), config.window)
    used = [*itertools.chain(*train, *held_out)]
    count = len(train) + len(held_out)
    note = f"{plural(count, 'conversation')} with {plural(_answers(used), 'answer')} in {path}; loss on {_share(used):.1%} of "
    note += f"the tokens; windows {packed.fill(config.window):.1%} full"
    if files.unused:
        note += f"; {plural(len(files.unused), 'file')} not used, such as {files.unused[0]}"
    if longer := sum(len(ids) > size for sequences in read for ids, is_target in sequences if is_target[1:size].any()):
        note += f"; {longer:,} truncated to {size:,} tokens"
    if dropped:
        note += f"; {dropped:,} skipped without assistant tokens among the first {size:,}"
    if len(held_out) < len(val):
        note += f"; {len(val) - len(held_out):,} not held out, because they are also among the training conversations"
    note += str(skipped)
    if 0 < len(held_out) < MIN_HELD_OUT:
        note += f"; {len(held_out)} held out, fewer than {MIN_HELD_OUT}: hold out more to compare runs by their loss"
    return packed, pack_conversations(itertools.chain(*held_out), config.window), note, files.fingerprint


def _truncated(sequences: Sequence[Conversation], size: int) -> list[Conversation]:
    """Truncate the sequences of a conversation to `size` ids; drop sequences without targets."""
    kept = list[Conversation]()
    for ids, is_target in sequences:
        if is_target[1:size].any():
            kept.append(Conversation(ids[:size], is_target[:size]))
    return kept


def _answers(sequences: Sequence[Conversation]) -> int:
    """Count the answers: runs of targets."""
    answers = 0
    for _, is_target in sequences:
        begins = is_target[1:] & ~is_target[:-1]
        answers += int(begins.sum()) + int(is_target[0])
    return answers


def _share(sequences: Sequence[Conversation]) -> float:
    """Return the fraction of the predicted ids that are targets."""
    targets = sum(int(each.is_target[1:].sum()) for each in sequences)
    return targets / sum(len(each.ids) - 1 for each in sequences)


def _without_copies(
    held_out: Sequence[list[Conversation]], train: Sequence[list[Conversation]]
) -> list[list[Conversation]]:
    """Remove conversations that are also training conversations."""
    seen = {_key(sequences) for sequences in train}
    return [sequences for sequences in held_out if _key(sequences) not in seen]


def _key(sequences: Sequence[Conversation]) -> tuple[bytes, ...]:
    return tuple(each.ids.tobytes() for each in sequences)


def pack_conversations(conversations: Iterable[Conversation], block_size: int) -> Packed:
    """Pack conversations of 2 to T + 1 ids into windows."""
    empty = Conversation(np.zeros(0, np.int32), np.zeros(0, bool))
    conversations = [*conversations]
    ids, is_target = (np.concatenate(parts) for parts in zip(empty, *conversations, strict=True))
    sizes = np.array([len(each.ids) for each in conversations], np.int64)
    return Packed.of(Tokens([ids]), np.cumsum(sizes) - sizes, sizes - 1, block_size, is_target)


def find_files(path: Path) -> Files:
    """List the files of conversations at a path.

    In a directory, the words train and val (or validation) in the path of a file determine its split, as for token files.
    Files without these words are for training if no file has the word train.
    """
    if not path.is_dir():
        return Files([path], [], [])
    files: dict[str, list[Path]] = {"train": [], "val": [], "": []}
    for file in visible_files(path):
        if holds_records(file):
            words = Path("-".join(file.relative_to(path).parts))
            files[split_of(words)].append(file)
    if files["train"]:
        return Files(files["train"], files["val"], files[""])
    if files[""]:
        return Files(files[""], files["val"], [])
    return Files(files["val"], [], [])


def check_conversations(path: Path, on_error: str = "fail") -> None:
    """Check that the records of a path are conversations, without a tokenizer and a chat template.

    Raises:
        UserError: if a record is not a conversation; with `on_error` skip: if all records are not.
    """
    files = find_files(path)
    skipped = Skipped(on_error)
    found = False
    for _ in read_chats([*files.train, *files.val], skipped):
        found = True
        if on_error == "skip":
            break  # a single conversation is sufficient
    if not found:
        raise _no_conversations(path, skipped)


def read_chats(
    files: Sequence[Path], skipped: Skipped, progress: Progress = no_progress
) -> Iterator[tuple[str, Chat | Pair]]:
    """Yield the conversations of files with their places, such as "a.jsonl, line 3"; progress counts bytes."""
    total = sum(path.stat().st_size for path in files)
    done = 0
    for path in files:
        for record in read_records(path, FIELDS):
            progress(done + record.read, total)
            if record.error:
                reason = "that end the reading of their file" if record.lost else "unreadable"
                skipped.add(reason, record.where, record.error)
                continue
            try:
                chat = read_record(record.value)
            except UserError as e:
                skipped.add("of an unknown shape", record.where, str(e))
                continue
            yield record.where, chat
        done += path.stat().st_size


def read_conversations(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    skipped: Skipped,
    progress: Progress = no_progress,
) -> list[list[Conversation]]:
    """Read and encode the conversations of files; return the sequences of each."""
    conversations = list[list[Conversation]]()
    for where, chat in read_chats(files, skipped, progress):
        try:
            conversations.append([encode_conversation(chat, tokenizer, template)])
        except UserError as e:
            skipped.add("that cannot be encoded", where, str(e))
    return conversations


def encode_conversation(chat: Chat | Pair, tokenizer: Tokenizer, template: ChatTemplate | None) -> Conversation:
    """Encode a conversation.

    With a template, a prompt and its completion become a user and an assistant message. Without a template, the ids are
    the tokenizer's beginning-of-text ids (if any), the prompt, the completion and the end-of-text id (if any).

    Raises:
        UserError: if messages have no template or no assistant message to train on, or cannot be encoded.
    """
    if isinstance(chat, Pair):
        if template is None:
            return _encode_pair(chat.prompt, chat.completion, tokenizer)
        chat = chat.chat
    if template is None:
        raise UserError("messages need a chat template, which the model lacks: use a prompt and a completion (strings)")
    if all(message["role"] != "assistant" for message in chat.messages):
        raise UserError("no message has the role assistant, but only assistant messages are trained on: add one")
    rendered = template.assistant_spans(chat.messages, chat.tools)
    spans = _with_weights(rendered.spans, chat.messages)
    return Conversation(*encode_spans(tokenizer, rendered.text, spans))


def _with_weights(spans: list[tuple[int, int]], messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Remove the spans of assistant messages with the weight 0."""
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if all(weights):
        return spans
    if len(spans) != len(weights):
        raise UserError(
            f"a message has the weight 0, but the chat template marks {plural(len(spans), 'text')} in "
            f"{plural(len(weights), 'assistant message')}: remove the weights, or omit the conversation"
        )
    return [span for span, weight in zip(spans, weights, strict=True) if weight]


def _encode_pair(prompt: str, completion: str, tokenizer: Tokenizer) -> Conversation:
    before = tokenizer.encode(prompt).tolist()
    whole = tokenizer.encode(tokenizer.separator.join((prompt, completion))).tolist()
    # Some tokenizers prepend a space to each text, so the completion's ids are taken from the joined text if possible.
    answer = whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(completion).tolist()
    bos, end = list(tokenizer.bos_ids), [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    before = before if before[: len(bos)] == bos else bos + before
    ids = np.array([*before, *answer, *end], np.int32)
    return Conversation(ids, np.arange(len(ids)) >= len(before))


def _no_conversations(path: Path, skipped: Skipped) -> UserError:
    return UserError(f"{path} has no conversations{skipped}; write one per line, as {EXAMPLE}")
