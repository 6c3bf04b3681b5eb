"""Conversations for fine-tuning: files of records -> ids and a mask of the assistant's ids -> windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.chat.encoding import ChatFormat, Conversation, chat_format
from jaxgpt.data.chat.files import find_files, no_conversations, read_chats
from jaxgpt.data.chat.messages import is_known_role
from jaxgpt.data.chat.omitted import omitted_calls, omitted_messages, omitted_tools
from jaxgpt.data.chat.records import ChatRecord, Pair
from jaxgpt.data.example_notes import describe_conversations, notes_on_split, notes_on_templates
from jaxgpt.data.examples import hold_out
from jaxgpt.data.files.skipped import Skipped
from jaxgpt.data.packing import Packed
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.continuation import encode_continuation
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress

DATE = "2024-07-26"  # date for templates that include it, fixed for deterministic encoding

Sequences = list[Conversation]  # the sequences of a conversation, usually one


class Formats(NamedTuple):
    """The formats of a model's conversations; None: the model has no chat template for them."""

    plain: ChatFormat | None  # conversations without tools
    with_tools: ChatFormat | None

    def of(self, chat: ChatRecord | Pair | str) -> ChatFormat | None:
        """Return the format of a conversation, or of a prompt that is a text."""
        has_tools = isinstance(chat, ChatRecord) and chat.tools is not None
        return self.with_tools if has_tools else self.plain


def formats_of(tokenizer: Tokenizer, data: DataConfig) -> Formats:
    """Return the formats of a model's conversations, with a fixed date."""
    return Formats(
        plain=chat_format(tokenizer, data, date=DATE),
        with_tools=chat_format(tokenizer, data, date=DATE, with_tools=True),
    )


class Loaded(NamedTuple):
    """The conversations of `data.path`.

    Attributes:
        train: training data.
        val: validation data, which may be empty.
        note: a one-line description.
        fingerprint: SHA-256 of the files.
    """

    train: Packed
    val: Packed
    note: str
    fingerprint: str


def load_conversations(config: Config, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS) -> Loaded:
    """Read, encode, split and pack the conversations of `data.path`.

    Conversations of more than T + 1 ids are truncated; conversations without assistant tokens are then dropped.

    Raises:
        UserError: if a file cannot be read, a record is not a conversation (unless `data.on_error` is skip), or no
            conversation remains.
    """
    path = Path(config.data.path)
    formats = formats_of(tokenizer, config.data)

    # Read and encode.
    files = find_files(path)
    skipped = Skipped(config.data.on_error)
    read_train = read_conversations(files.train, tokenizer, formats, skipped, progress)
    read_val = read_conversations(files.val, tokenizer, formats, skipped, progress)
    if not read_train:
        raise no_conversations(path, skipped)

    # Truncate to windows.
    size = config.window + 1
    train, truncated_train = _truncated(read_train, size)
    val, truncated_val = _truncated(read_val, size)
    if not train:
        raise _no_targets(config, [*read_train, *read_val])
    dropped = len(read_train) + len(read_val) - len(train) - len(val)

    # Split and pack.
    split = hold_out(train, val, files, config.data.train_fraction, _key)
    packed = pack_conversations(itertools.chain(*split.train), config.window)
    packed_val = pack_conversations(itertools.chain(*split.val), config.window)

    notes = [
        describe_conversations([*split.train, *split.val], path),
        f"windows {packed.fill(config.window):.1%} full",
    ]
    notes += notes_on_templates(formats)
    truncated = truncated_train + truncated_val
    if truncated:
        notes.append(f"{truncated:,} truncated to {size:,} tokens")
    if dropped:
        notes.append(f"{dropped:,} skipped without assistant tokens among the first {size:,}")
    notes += notes_on_split(files, split, "conversations")
    return Loaded(packed, packed_val, "; ".join(notes) + str(skipped), files.fingerprint)


def _no_targets(config: Config, conversations: Iterable[Sequences]) -> UserError:
    """Return the error for conversations without targets in the windows, or without any target."""
    path = config.data.path
    if not any(sequence.is_target[1:].any() for sequence in itertools.chain(*conversations)):
        return UserError(
            f"{path} has no target: all answers have the weight 0, or all records are empty; add an answer to train on"
        )
    setting = config.window_setting
    flag = "--" + setting.split()[0].replace("_", "-")
    size = config.window + 1
    return UserError(
        f"no conversation of {path} has assistant tokens among its first {size:,} ({setting}): raise {flag}"
    )


def _truncated(conversations: Sequence[Sequences], size: int) -> tuple[list[Sequences], int]:
    """Truncate sequences to `size` ids, then drop sequences and conversations without targets.

    Returns:
        The remaining conversations, and the number of truncated sequences.
    """
    remaining = list[Sequences]()
    truncated = 0
    for sequences in conversations:
        kept = Sequences()
        for ids, is_target in sequences:
            if not is_target[1:size].any():
                continue
            truncated += len(ids) > size
            kept.append(Conversation(ids[:size], is_target[:size]))
        if kept:
            remaining.append(kept)
    return remaining, truncated


def _key(sequences: Sequences) -> tuple[bytes, ...]:
    """Return a key that is equal for equal conversations."""
    return tuple(sequence.ids.tobytes() for sequence in sequences)


def pack_conversations(conversations: Iterable[Conversation], block_size: int) -> Packed:
    """Pack conversations of 2 to T + 1 ids into windows."""
    empty = Conversation(np.zeros(0, np.int32), np.zeros(0, bool))
    conversations = [*conversations]
    ids, is_target = (np.concatenate(parts) for parts in zip(empty, *conversations, strict=True))
    sizes = np.array([len(conversation.ids) for conversation in conversations], np.int64)
    return Packed.of(Tokens([ids]), np.cumsum(sizes) - sizes, sizes - 1, block_size, is_target)


def read_conversations(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    formats: Formats,
    skipped: Skipped,
    progress: Progress = NO_PROGRESS,
) -> list[Sequences]:
    """Read and encode the conversations of files; `skipped` receives the others, and messages that are not trained on."""
    conversations = list[Sequences]()
    for where, chat in read_chats(files, skipped, progress):
        form = formats.of(chat)
        try:
            conversations.append(encode_conversation(chat, tokenizer, form))
        except UserError as e:
            skipped.skip("that cannot be encoded", where, str(e))
            continue
        if isinstance(chat, Pair) or form is None:
            continue
        if chat.may_be_rejected:
            skipped.count_label_false(where)
        for role in omitted_messages(chat, form.template):
            skipped.count_omitted(where, role)
        for message in chat.messages:
            if not is_known_role(message["role"]):
                skipped.count_unknown_role(where, message["role"])
    return conversations


def encode_conversation(chat: ChatRecord | Pair, tokenizer: Tokenizer, form: ChatFormat | None) -> Sequences:
    """Encode a conversation.

    With a chat template, a prompt and its completion become a user and an assistant message. Without a template, the ids are
    the tokenizer's beginning-of-text ids (if any), the prompt, the completion and the end-of-text id (if any).

    Args:
        chat: conversation.
        tokenizer: tokenizer of the model.
        form: format of the model's conversations, with the same tokenizer; None: the model has no chat template.

    Raises:
        UserError: if messages have no template or no assistant message to train on, or the template or tokenizer rejects them
            or omits tools or calls.
    """
    if isinstance(chat, Pair):
        if form is None:
            return [_encode_pair(chat.prompt, chat.completion, tokenizer)]
        chat = chat.chat
    if form is None:
        raise UserError("messages need a chat template, which the model lacks: use a prompt and a completion (strings)")
    sequences = form.encode(chat.messages, chat.tools)
    omitted = omitted_tools(chat, form.template) | omitted_calls(chat, form.template)
    if omitted:
        raise UserError(
            f"the chat template does not render the function {short_repr(min(omitted))} of the tools or calls: use a template "
            f"that supports tools, or write them as text"
        )
    return sequences


def _encode_pair(prompt: str, completion: str, tokenizer: Tokenizer) -> Conversation:
    """Encode a prompt and its completion between the tokens that begin and end a text; completion and end are targets."""
    before = tokenizer.after_bos(tokenizer.encode(prompt).tolist())
    answer = encode_continuation(tokenizer, prompt, completion).tolist()
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    ids = np.array([*before, *answer, *end], np.int32)
    return Conversation(ids, np.arange(len(ids)) >= len(before))
