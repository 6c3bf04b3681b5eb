"""Open the data of a config: text, token files, conversations, preference pairs, prompts, or a mixture of sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.chat.files import find_files
from jaxgpt.data.conversations import load_conversations
from jaxgpt.data.example_files import Loaded
from jaxgpt.data.mixed_sources import check_spellings, mixed
from jaxgpt.data.opened import Data, Recorded
from jaxgpt.data.packing import Packed, pack_documents
from jaxgpt.data.preferences import load_preferences
from jaxgpt.data.prepared.shards import prepared_bos
from jaxgpt.data.prepared.sources import file_digests
from jaxgpt.data.prompts import load_prompts
from jaxgpt.data.run_tokenizer import run_tokenizer
from jaxgpt.data.source_kinds import Kind, kind_of
from jaxgpt.data.text import NO_TEXT, Text, read_text
from jaxgpt.data.token_files import has_validation_files, open_splits, token_files
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import bos_note, text_bos
from jaxgpt.data.tokenizers.cuts import cut
from jaxgpt.data.tokens import Split, Tokens
from jaxgpt.data_files import located
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress

# The reader of each kind of records.
READERS: dict[Kind, Callable[[Config, Tokenizer, Progress], Loaded[Any]]] = {
    "conversations": load_conversations,
    "preference pairs": load_preferences,
    "prompts": load_prompts,
}
TOGETHER = 64  # number of pieces of a text to encode per call; `tokenizers` uses all cores


def open_data(
    config: Config, tokenizer: Tokenizer | None = None, progress: Progress = NO_PROGRESS, tokens: int = 0
) -> Data:
    """Read, tokenize and split the data of a config.

    Args:
        config: config of a run or preset; uses `data`, `post`, `directory`, `model.vocab_size` and `window`.
        tokenizer: tokenizer of an existing run; None: the tokenizer of a prepared directory, or `data.tokenizer`.
        progress: called with (done, total), in characters of a text or bytes of conversations.
        tokens: number of training tokens so far; the sources of mixtures that have ended are not opened.

    Raises:
        UserError: if the data cannot be read, is too short, or does not fit `config.data` or `model.vocab_size`.
    """
    data = config.data
    if data.dataset == "none" and not (data.path or data.mix) and config.post.objective == "next-token":
        raise UserError(NO_TEXT)
    tokenizer = run_tokenizer(config, tokenizer)
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"set it to 0, or raise it"
        )
    if data.mix:
        return _open_mixture(config, tokenizer, progress, tokens)

    name = data.path or data.dataset
    data = located(data, config.directory)
    config = replace(config, data=data)
    kind = kind_of(config, data)
    opened = _open_source(kind, config, tokenizer, progress)
    held_out = len(opened.val) > 0
    val = opened.val if held_out else opened.train  # without held-out data, the training data are evaluated
    _check_evaluated(val, config.window, opened.source)
    digests = file_digests(Path(data.path), opened.files) if data.path else {}
    return Data(
        train=opened.train,
        val=val,
        held_out=held_out,
        tokenizer=tokenizer,
        source=opened.source,
        fingerprint=opened.fingerprint,
        kind=kind,
        name=name,
        text=opened.text,
        bos_ids=opened.bos_ids,
        recorded=Recorded(boundary=opened.boundary, files=digests),
    )


def with_path(config: Config, path: str) -> Config:
    """Return a config for evaluation on `path` (only validation files, if any); empty path: on the last mixture."""
    if not path:
        return replace(config, data=config.data.with_last_mixture())
    return replace(config, data=replace(config.data, path=path, mix=(), train_fraction=1.0), directory="")


def _check_evaluated(val: Split, window: int, source: str) -> None:
    """Raise `UserError` if a split has no evaluation window."""
    if len(val.eval_starts(window, window)):
        return
    if isinstance(val, Packed):
        fix = "use longer documents, or change --data.train-fraction"
        raise UserError(f"no evaluation window: the evaluated documents of {source} have a single id each; {fix}")
    raise UserError(f"too few tokens for evaluation: {len(val)} in {source}; use a longer text")


class _Opened(NamedTuple):
    """A source of one kind, as read; fields as in `Data` and `Recorded`, except `val` and `files`."""

    train: Split
    val: Split  # empty: nothing is held out
    source: str
    fingerprint: str
    files: Sequence[Path]
    boundary: int | None = None
    text: Text | None = None
    bos_ids: tuple[int, ...] = ()


def _open_source(kind: Kind, config: Config, tokenizer: Tokenizer, progress: Progress) -> _Opened:
    """Open a source of any kind, and apply `data.documents` to texts and token files."""
    data = config.data
    if kind in READERS:
        opened = _open_records(kind, config, tokenizer, progress)
    elif kind == "token ids":
        opened = _open_tokens(data, tokenizer)
    else:
        opened = _open_text(data, tokenizer, progress)

    train = opened.train
    val = opened.val
    if data.documents == "flow" or not isinstance(train, Tokens) or not isinstance(val, Tokens):
        return opened
    train_documents, val_documents, note = _as_documents(config, train, val, tokenizer.end_ids)
    return opened._replace(train=train_documents, val=val_documents, source=opened.source + note)


def _open_records(kind: Kind, config: Config, tokenizer: Tokenizer, progress: Progress) -> _Opened:
    """Open conversations, preference pairs or prompts."""
    records = READERS[kind](config, tokenizer, progress)
    source = records.note
    if tokenizer.special.chat_template is None:
        source += bos_note(tokenizer, tokenizer.bos_ids, "before each prompt")
    found = find_files(Path(config.data.path))
    return _Opened(
        records.train,
        records.val,
        source,
        records.fingerprint,
        files=[*found.train, *found.val],
        boundary=len(found.train) if found.val else None,
    )


def _open_tokens(data: DataConfig, tokenizer: Tokenizer) -> _Opened:
    """Open token files."""
    path = Path(data.path)
    train, val, source = open_splits(path, data.train_fraction, tokenizer.vocab_size)
    files = token_files(path)
    fingerprint = Tokens([*train.parts, *val.parts], tokenizer.vocab_size).fingerprint()
    recorded_bos = prepared_bos(path)
    if recorded_bos is not None:
        source += bos_note(tokenizer, recorded_bos, "before each document")
    return _Opened(
        train,
        val,
        source,
        fingerprint,
        files=[*files.train, *files.val],
        boundary=len(train) if has_validation_files(path) else None,
        bos_ids=recorded_bos or (),
    )


def _open_text(data: DataConfig, tokenizer: Tokenizer, progress: Progress) -> _Opened:
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
    return _Opened(train, val, source, text.sha256, files=files, text=text)


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


def _as_documents(config: Config, train: Tokens, val: Tokens, ends: tuple[int, ...]) -> tuple[Split, Split, str]:
    """Apply `data.documents` (mask or pack) to both splits; also return a note for `source`."""
    setting = config.data.documents
    T = config.window
    if not ends:
        raise UserError(
            f"data.documents {setting} needs an end-of-text id after each document, but the tokenizer lacks it: choose a "
            f"different tokenizer, or --data.documents flow"
        )
    train = Tokens(train.parts, train.vocab_size, ends, train.first_id)
    val = Tokens(val.parts, val.vocab_size, ends, val.first_id)
    if setting == "mask":
        return train, val, ""
    packed = pack_documents(train, T)
    return packed, pack_documents(val, T), f"; {packed.documents:,} documents, windows {packed.fill(T):.1%} full"


def _open_mixture(config: Config, tokenizer: Tokenizer, progress: Progress, tokens: int) -> Data:
    """Open the sources of the mixtures that have not ended after a number of training tokens."""
    check_spellings(config.data.mix)
    parts = {}
    for each in config.data.remaining_sources(tokens):
        parts[each.path] = open_data(replace(config, data=each), tokenizer, progress)
    return mixed(config.data, parts)
