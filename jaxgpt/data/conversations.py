"""Conversations for fine-tuning: files of records -> ids and a mask of the targets -> windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.chat.encoding import ChatFormat, Conversation
from jaxgpt.data.chat.formats import Formats, formats_of
from jaxgpt.data.chat.messages import is_known_role
from jaxgpt.data.chat.omitted import omitted_calls, omitted_tools
from jaxgpt.data.chat.records import CONVERSATIONS, ChatRecord, Pair
from jaxgpt.data.chat.warnings import FALSE_LABEL, OMITTED_MESSAGE, UNKNOWN_ROLE
from jaxgpt.data.example_files import Examples, Loaded, hold_out, read_examples
from jaxgpt.data.example_notes import describe_conversations, notes_on_split, notes_on_templates
from jaxgpt.data.files.skipped import Skipped
from jaxgpt.data.packing import Packed
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.continuation import encode_continuation
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress

Sequences = list[Conversation]  # the sequences of a conversation, usually one


def load_conversations(config: Config, tokenizer: Tokenizer, progress: Progress = NO_PROGRESS) -> Loaded[Packed]:
    """Read, encode, split and pack the conversations of `data.path`.

    Sequences are truncated to T + 1 ids; sequences without targets among these ids are dropped, and so are conversations
    without remaining sequences.

    Raises:
        UserError: if a file cannot be read or a record is not a conversation (unless `data.on_error` is skip), or no
            conversation remains for training.
    """
    formats = formats_of(tokenizer, config.data)
    read = read_conversations(config.data, tokenizer, formats, progress)

    # Truncate to windows.
    size = config.window + 1
    train, truncated_train = _truncated(read.train, size)
    val, truncated_val = _truncated(read.val, size)
    if not train:
        raise _no_targets(config, [*read.train, *read.val])
    dropped = len(read.train) + len(read.val) - len(train) - len(val)

    # Split and pack.
    split = hold_out(read._replace(train=train, val=val), config.data.train_fraction, _key)
    packed = pack_conversations(itertools.chain(*split.train), config.window)
    packed_val = pack_conversations(itertools.chain(*split.val), config.window)

    notes = [
        describe_conversations([*split.train, *split.val], Path(config.data.path)),
        f"windows {packed.fill(config.window):.1%} full",
    ]
    notes += notes_on_templates(formats)
    truncated = truncated_train + truncated_val
    if truncated:
        notes.append(f"{truncated:,} truncated to {size:,} tokens")
    if dropped:
        notes.append(f"{dropped:,} skipped without assistant tokens among the first {size:,}")
    notes += notes_on_split(read.files, split, "conversations")
    return Loaded(packed, packed_val, "; ".join(notes) + str(read.skipped), read.files.fingerprint)


def read_conversations(
    data: DataConfig, tokenizer: Tokenizer, formats: Formats, progress: Progress = NO_PROGRESS
) -> Examples[Sequences]:
    """Read and encode the conversations of `data.path`, and count those that may be wrong."""

    def encode(chat: ChatRecord | Pair) -> Sequences:
        return encode_conversation(chat, tokenizer, formats.of(chat))

    def count(skipped: Skipped, where: str, chat: ChatRecord | Pair) -> None:
        if isinstance(chat, Pair):
            return
        if chat.may_be_rejected:
            skipped.warn(FALSE_LABEL, where)
        for role in formats.omitted_roles(chat):
            skipped.warn(OMITTED_MESSAGE, where, role)
        for message in chat.messages:
            role = message["role"]
            if not is_known_role(role):
                skipped.warn(UNKNOWN_ROLE, f"{short_repr(role)} in {where}")

    return read_examples(data, CONVERSATIONS, encode, count, progress)


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
        The remaining conversations, and the number of their sequences that are truncated.
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
    # An empty conversation gives the arrays their types even if there are no conversations.
    empty = Conversation(np.zeros(0, np.int32), np.zeros(0, bool))
    conversations = [empty, *conversations]
    ids = np.concatenate([conversation.ids for conversation in conversations])
    is_target = np.concatenate([conversation.is_target for conversation in conversations])

    sizes = np.array([len(conversation.ids) for conversation in conversations[1:]], np.int64)
    begins = np.cumsum(sizes) - sizes
    inputs = sizes - 1  # the last id of a conversation is only a target
    return Packed.of(Tokens([ids]), begins, inputs, block_size, is_target)


def encode_conversation(chat: ChatRecord | Pair, tokenizer: Tokenizer, form: ChatFormat | None) -> Sequences:
    """Encode a conversation.

    With a chat template, a prompt and its completion become a user and an assistant message. Without a template, the ids are
    the tokenizer's beginning-of-text ids (if any), the prompt, the completion and the end-of-text id (if any).

    Args:
        chat: conversation.
        tokenizer: tokenizer of the model.
        form: format of the model's conversations, with the same tokenizer; None: the model has no chat template.

    Raises:
        UserError: if messages have no template or no assistant message to train on, the template or tokenizer rejects them, or
            the template omits tools or calls.
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
            "that supports tools, or write them as text"
        )
    return sequences


def _encode_pair(prompt: str, completion: str, tokenizer: Tokenizer) -> Conversation:
    """Encode a prompt and its completion between the tokens that begin and end a text; completion and end are targets."""
    before = tokenizer.after_bos(tokenizer.encode(prompt).tolist())
    answer = encode_continuation(tokenizer, prompt, completion).tolist()
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    ids = np.array([*before, *answer, *end], np.int32)
    return Conversation(ids, np.arange(len(ids)) >= len(before))
