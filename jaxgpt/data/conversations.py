"""Conversations for fine-tuning: JSON Lines -> ids and a mask of the assistant's ids -> windows."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data.chat_encoding import Conversation, chat_format, encode_messages
from jaxgpt.data.chat_template import ChatTemplate, check_messages
from jaxgpt.data.packing import Packed
from jaxgpt.data.text import Progress, no_progress
from jaxgpt.data.tokenizer import Tokenizer, encode_continuation
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError, plural, reported, short_repr
from jaxgpt.files import parse_json

DATE = "2024-07-26"  # date for templates that include it, fixed for deterministic encoding
PAIR = '{"prompt": "Hi", "completion": "Hello"}'
EXAMPLE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'


def load_conversations(
    path: Path,
    tokenizer: Tokenizer,
    block_size: int,
    train_fraction: float = 1.0,
    progress: Progress = no_progress,
    data: DataConfig | None = None,
) -> tuple[Packed, Packed, str, str]:
    """Read, encode, split and pack the conversations of a file.

    Conversations of more than T + 1 ids are truncated; conversations without assistant tokens are then dropped. `data`
    has the variables of the chat template.

    Returns:
        Training data; validation data, which may be empty; a one-line description; and the SHA-256 of the file.

    Raises:
        UserError: if the file cannot be read, a line is not a conversation, or no conversation remains.
    """
    size = block_size + 1
    form = chat_format(tokenizer, data or DataConfig(), date=DATE)
    template = form.template if form else None
    conversations, sha256 = read_conversations(path, tokenizer, template, progress)
    kept = list[list[Conversation]]()  # the sequences of each conversation
    truncated = 0
    for sequences in conversations:
        used = [each for each in sequences if each.is_target[1:size].any()]
        truncated += any(len(each.ids) > size for each in used)
        if used:
            kept.append([Conversation(ids[:size], is_target[:size]) for ids, is_target in used])
    if not kept:
        raise UserError(
            f"no conversation of {path} has assistant tokens among its first {size:,}: raise "
            f"--data.window or --model.block-size"
        )
    n = max(int(train_fraction * len(kept)), 1)
    train = pack_conversations(list(chain(*kept[:n])), block_size)
    val = pack_conversations(list(chain(*kept[n:])), block_size)

    sequences = list(chain(*kept))
    targets = sum(int(each.is_target[1:].sum()) for each in sequences)
    share = targets / sum(len(each.ids) - 1 for each in sequences)
    note = f"{plural(len(kept), 'conversation')} in {path}; loss on {share:.1%} of the tokens"
    if form and form.frame.kept_opening:
        note += f", including {form.frame.kept_opening!r}, which the template adds to each answer"
    if len(sequences) > len(kept):
        note += f"; {len(sequences):,} sequences, because the template changes earlier messages"
    note += f"; windows {train.fill(block_size):.1%} full"
    if truncated:
        note += f"; {truncated:,} truncated to {size:,} tokens"
    dropped = len(conversations) - len(kept)
    if dropped:
        note += f"; {dropped:,} skipped without assistant tokens among the first {size:,}"
    return train, val, note, sha256


def pack_conversations(conversations: Sequence[Conversation], block_size: int) -> Packed:
    """Pack conversations of 2 to T + 1 ids into windows."""
    empty = Conversation(np.zeros(0, np.int32), np.zeros(0, bool))
    ids, is_target = (np.concatenate(parts) for parts in zip(empty, *conversations, strict=True))
    sizes = np.array([len(each.ids) for each in conversations], np.int64)
    return Packed.of(Tokens([ids]), np.cumsum(sizes) - sizes, sizes - 1, block_size, is_target)


def read_conversations(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, progress: Progress = no_progress
) -> tuple[list[list[Conversation]], str]:
    """Read and encode the conversations of a file, one per line; return the sequences of each, and the file's SHA-256."""
    with reported(f"cannot read {path}"):
        data = path.read_bytes()
    conversations = list[list[Conversation]]()
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            value = parse_json(line, where)
            try:
                conversations.append(encode_conversation(value, tokenizer, template))
            except UserError as e:
                raise UserError(f"{where}: {e}") from None
        progress(number, len(lines))
    if not conversations:
        raise UserError(f"{path} has no conversations: write one per line, as {EXAMPLE}")
    return conversations, hashlib.sha256(data).hexdigest()


def encode_conversation(value: Any, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[Conversation]:
    """Encode `{"messages": [...]}` or `{"prompt": "...", "completion": "..."}`.

    With a template, a prompt and its completion become a user and an assistant message. Without a template, the ids are
    the tokenizer's beginning-of-text ids (if any), the prompt, the completion and the end-of-text id (if any). A
    conversation has several sequences if the template changes earlier messages (`ChatFormat.encode`).

    Raises:
        UserError: if the value has neither form, has tools or weights != 1, has no assistant message, or cannot be encoded.
    """
    match value:
        case {"tools": [_, *_]}:
            raise UserError("tools are not supported: write them into the system message, or omit them")
        case {"messages": list() as messages}:
            if template is None:
                raise UserError("messages need a chat template, which the model lacks: use a prompt and a completion")
        case {"prompt": str() as prompt, "completion": str() as completion}:
            if template is None:
                return [_encode_pair(prompt, completion, tokenizer)]
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        case _:
            raise UserError(
                f"neither a list of messages, nor a prompt and a completion (strings): {short_repr(value)}; write "
                f"{EXAMPLE} or {PAIR}; to train on documents, use jaxgpt data prepare"
            )
    if any(message.get("weight", 1) != 1 for message in check_messages(messages)):
        raise UserError("a message has a weight other than 1, which is not supported: omit the conversation")
    return encode_messages(messages, None, tokenizer, template)


def _encode_pair(prompt: str, completion: str, tokenizer: Tokenizer) -> Conversation:
    before = tokenizer.encode(prompt).tolist()
    answer = encode_continuation(tokenizer, prompt, completion).tolist()
    bos = list(tokenizer.bos_ids)
    if before[: len(bos)] != bos:
        before = bos + before
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    ids = np.array([*before, *answer, *end], np.int32)
    return Conversation(ids, np.arange(len(ids)) >= len(before))
