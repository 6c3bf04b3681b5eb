"""Open one source: read, tokenize and split a text, token files, conversations, preference pairs or prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.chat.files import find_files
from jaxgpt.data.conversations import load_conversations
from jaxgpt.data.example_files import Loaded
from jaxgpt.data.packing import pack_documents
from jaxgpt.data.preferences import load_preferences
from jaxgpt.data.prepared.shards import prepared_bos
from jaxgpt.data.prompts import load_prompts
from jaxgpt.data.source_kinds import Kind
from jaxgpt.data.text import Text, read_text
from jaxgpt.data.token_files import has_validation_files, open_splits, token_files
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import bos_note, text_bos
from jaxgpt.data.tokenizers.cuts import cut
from jaxgpt.data.tokens import Split, Tokens
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress

# The reader of each kind of records.
READERS: dict[Kind, Callable[[Config, Tokenizer, Progress], Loaded[Any]]] = {
    "conversations": load_conversations,
    "preference pairs": load_preferences,
    "prompts": load_prompts,
}
TOGETHER = 64  # number of pieces of a text to encode per call; `tokenizers` uses all cores


class OpenedSource(NamedTuple):
    """A source of one kind, as read; fields as in `Data` and `Recorded`, except `val` and `files`."""

    train: Split
    val: Split  # empty: nothing is held out
    source: str
    fingerprint: str
    files: Sequence[Path]  # files of the source; empty: a built-in text or a single text file
    boundary: int | None = None
    text: Text | None = None
    bos_ids: tuple[int, ...] = ()


def open_source(kind: Kind, config: Config, tokenizer: Tokenizer, progress: Progress) -> OpenedSource:
    """Open a source of any kind, and apply `data.documents` to texts and token files.

    Raises:
        UserError: if the source cannot be read, or does not fit the tokenizer or `data.documents`.
    """
    if kind in READERS:
        return _open_records(kind, config, tokenizer, progress)
    if kind == "token ids":
        opened = _open_tokens(config.data, tokenizer)
    else:
        opened = _open_text(config.data, tokenizer, progress)
    return opened if config.data.documents == "flow" else _with_documents(opened, config, tokenizer.end_ids)


def _open_records(kind: Kind, config: Config, tokenizer: Tokenizer, progress: Progress) -> OpenedSource:
    """Open conversations, preference pairs or prompts."""
    records = READERS[kind](config, tokenizer, progress)
    source = records.note
    if tokenizer.special.chat_template is None:
        source += bos_note(tokenizer, tokenizer.bos_ids, "before each prompt")
    found = find_files(Path(config.data.path))
    return OpenedSource(
        records.train,
        records.val,
        source,
        records.fingerprint,
        files=[*found.train, *found.val],
        boundary=len(found.train) if found.val else None,
    )


def _open_tokens(data: DataConfig, tokenizer: Tokenizer) -> OpenedSource:
    """Open token files."""
    path = Path(data.path)
    train, val, source = open_splits(path, data.train_fraction, tokenizer.vocab_size)
    files = token_files(path)
    fingerprint = Tokens([*train.parts, *val.parts], tokenizer.vocab_size).fingerprint()
    recorded_bos = prepared_bos(path)
    if recorded_bos is not None:
        source += bos_note(tokenizer, recorded_bos, "before each document")
    return OpenedSource(
        train,
        val,
        source,
        fingerprint,
        files=[*files.train, *files.val],
        boundary=len(train) if has_validation_files(path) else None,
        bos_ids=recorded_bos or (),
    )


def _open_text(data: DataConfig, tokenizer: Tokenizer, progress: Progress) -> OpenedSource:
    """Read, tokenize and split a text."""
    text = read_text(data)
    try:
        encoded = encode_text(tokenizer, text.text, progress)
    except UserError as e:  # for example, a character that the tokenizer of a run lacks
        raise UserError(f"{data.path or data.dataset}: {e}") from None

    bos = text_bos(tokenizer, data.bos)
    first_id = bos[-1] if bos else None
    ids = Tokens([encoded], tokenizer.vocab_size, first_id=first_id)
    train, val = ids.split(int(data.train_fraction * len(ids)))
    source = text.source + bos_note(tokenizer, bos[-1:], "at the start of each window")
    files = [Path(data.path) / name for name, _ in text.files]
    return OpenedSource(train, val, source, text.sha256, files=files, text=text)


def encode_text(tokenizer: Tokenizer, text: str, progress: Progress = NO_PROGRESS) -> np.ndarray:
    """Encode a text to ids `[n]` of the smallest sufficient integer type; `progress` counts characters."""
    dtype = np.min_scalar_type(max(tokenizer.vocab_size - 1, 0))
    pieces = cut(text, tokenizer.cuts)
    parts = []
    done = 0
    for start in range(0, len(pieces), TOGETHER):
        piece = "".join(pieces[start : start + TOGETHER])
        parts.append(tokenizer.encode(piece).astype(dtype))
        done += len(piece)
        progress(done, len(text))
    return np.concatenate(parts)


def _with_documents(opened: OpenedSource, config: Config, ends: tuple[int, ...]) -> OpenedSource:
    """Apply `data.documents` (mask or pack) to the splits of a text or of token files."""
    setting = config.data.documents
    T = config.window
    if not ends:
        raise UserError(
            f"data.documents {setting} needs an end-of-text id after each document, but the tokenizer lacks it: choose a "
            "different tokenizer, or --data.documents flow"
        )
    assert isinstance(opened.train, Tokens)
    assert isinstance(opened.val, Tokens)
    train = opened.train.with_ends(ends)
    val = opened.val.with_ends(ends)
    if setting == "mask":
        return opened._replace(train=train, val=val)

    packed = pack_documents(train, T)
    note = f"; {packed.documents:,} documents, windows {packed.fill(T):.1%} full"
    return opened._replace(train=packed, val=pack_documents(val, T), source=opened.source + note)
