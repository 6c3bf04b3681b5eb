"""Open the data of a config: text, token files, conversations, preference pairs, or a mixture of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config, DataConfig, place_of
from jaxgpt.data.bos import describe, text_bos, with_bos
from jaxgpt.data.builtin import SHAKESPEARE_CHARACTERS
from jaxgpt.data.chat_files import check_conversations, find_files
from jaxgpt.data.conversations import load_conversations
from jaxgpt.data.cuts import cut
from jaxgpt.data.opened import Data, mixed
from jaxgpt.data.packing import Packed, pack_documents
from jaxgpt.data.preferences import check_preferences, load_preferences
from jaxgpt.data.prompts import check_prompts, load_prompts
from jaxgpt.data.shards import prepared_bos, prepared_tokenizer
from jaxgpt.data.sources import sampled_digest
from jaxgpt.data.text import NO_TEXT, Text, read_text
from jaxgpt.data.token_files import has_validation_files, is_token_path, open_splits, token_files
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import FROM_TEXT, make_tokenizer
from jaxgpt.data.tokens import Split, Tokens
from jaxgpt.errors import UserError, printable
from jaxgpt.files import check_kind, missing
from jaxgpt.progress import NO_PROGRESS, Progress

FILES = 100  # maximum number of files whose digests a checkpoint records, to name changed files
# The reader of each kind of records.
RECORDS: dict[str, Callable[..., Any]] = {
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
    tokenizer = _tokenizer(config, tokenizer)
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
    opened = _open_source(config, tokenizer, progress)
    held_out = len(opened.val) > 0
    val = opened.val if held_out else opened.train  # without held-out data, the training data are evaluated
    _check_evaluated(val, config.window, opened.source)
    return Data(
        train=opened.train,
        val=val,
        held_out=held_out,
        tokenizer=tokenizer,
        source=opened.source,
        fingerprint=opened.fingerprint,
        name=name,
        text=opened.text,
        boundary=opened.boundary,
        files=_digests(Path(data.path), opened.files) if data.path else {},
        bos_ids=opened.bos_ids,
    )


def _check_evaluated(val: Split, window: int, source: str) -> None:
    """Raise `UserError` if a split has no evaluation window."""
    if len(val.eval_starts(window, window)):
        return
    if isinstance(val, Packed):
        fix = "use longer documents, or change --data.train-fraction"
        raise UserError(f"no evaluation window: the evaluated documents of {source} have a single id each; {fix}")
    raise UserError(f"too few tokens for evaluation: {len(val)} in {source}; use a longer text")


class _Opened(NamedTuple):
    """A source of one kind; fields as in `Data`, except `files`."""

    train: Split
    val: Split  # empty: nothing is held out
    source: str
    fingerprint: str
    files: Sequence[Path]  # the files of a directory
    boundary: int | None = None
    text: Text | None = None
    bos_ids: tuple[int, ...] = ()


def _open_source(config: Config, tokenizer: Tokenizer, progress: Progress) -> _Opened:
    """Open a source of any kind, with its documents as in `data.documents`."""
    data = config.data
    kind = _kind(config, data)
    if kind in RECORDS:
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


def _open_records(kind: str, config: Config, tokenizer: Tokenizer, progress: Progress) -> _Opened:
    """Open conversations, preference pairs or prompts."""
    train, val, source, fingerprint = RECORDS[kind](config, tokenizer, progress)
    found = find_files(Path(config.data.path))
    if tokenizer.special.chat_template is None:
        source += describe(tokenizer, tokenizer.bos_ids, "before each prompt")
    return _Opened(
        train,
        val,
        source,
        fingerprint,
        files=[*found.train, *found.val],
        boundary=len(found.train) if found.val else None,
    )


def _open_tokens(data: DataConfig, tokenizer: Tokenizer) -> _Opened:
    """Open token files."""
    path = Path(data.path)
    train, val, source = open_splits(path, data.train_fraction, tokenizer.vocab_size)
    fingerprint = Tokens([*train.parts, *val.parts], tokenizer.vocab_size).fingerprint()
    recorded_bos = prepared_bos(path)
    if recorded_bos is not None:
        source += describe(tokenizer, recorded_bos, "before each document")
    return _Opened(
        train,
        val,
        source,
        fingerprint,
        files=[*chain(*token_files(path).values())],
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
    source = text.source + describe(tokenizer, bos[-1:], "at the start of each window")
    files = [Path(data.path) / name for name, _ in text.files]
    return _Opened(train, val, source, text.sha256, files=files, text=text)


def check_sources(config: Config, tokens: int = 0) -> None:
    """Check that the paths exist and that conversations can be read, before anything slow, such as reading weights.

    Args:
        config: config of a run or preset; its `data` and `directory` are used.
        tokens: number of training tokens so far; the sources of mixtures that have ended are not checked.

    Raises:
        UserError: if a path is missing or a record is not a conversation.
    """
    for each in remaining_sources(config.data, tokens):
        found = located(each, config.directory)
        kind = _kind(config, found)
        if kind == "conversations":
            check_conversations(Path(found.path), found.on_error)
        elif kind == "preference pairs":
            check_preferences(Path(found.path), found.on_error)
        elif kind == "prompts":
            check_prompts(Path(found.path), found.on_error)


def check_windows_begin(config: Config, setting: str) -> None:
    """Check that a source of the data has windows with a beginning-of-text token that a setting can change.

    Raises:
        UserError: if a path is missing, or no source is a text.
    """
    found = [located(each, config.directory) for each in config.data.sources]
    kinds = {_kind(config, each): each.path for each in found}
    if "text" not in kinds:
        kind, path = next(iter(kinds.items()))
        raise UserError(
            f"{setting} applies only to windows of a text, but {path} holds {kind}: omit it; the tokenizer of the run, the "
            f"chat template or the token files determine their beginning-of-text tokens"
        )


def remaining_sources(data: DataConfig, tokens: int) -> list[DataConfig]:
    """Return the settings of the sources of the mixtures that have not ended after a number of training tokens."""
    phases = data.phases
    ends = [phase.tokens for phase in phases[1:]]
    current = sum(end <= tokens for end in ends)
    needed = {path for phase in phases[current:] for path in data.weights(phase)}
    return [each for each in data.sources if each.path in needed]


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


def with_path(config: Config, path: str) -> Config:
    """Return a config for evaluation on `path` (only validation files, if any); empty path: on the last mixture."""
    if not path:
        return replace(config, data=config.data.last)
    return replace(config, data=replace(config.data, path=path, mix=(), train_fraction=1.0), directory="")


def located(data: DataConfig, directory: str) -> DataConfig:
    """Return the settings of a source with the path at which its data are found.

    Relative paths refer to `directory`, where the run was started; if the data are not there, to the current directory.

    Raises:
        UserError: if the data are in neither place.
    """
    if not data.path:
        return data
    found = place_of(data.path, directory)
    if Path(found).exists():
        return replace(data, path=found)
    is_elsewhere = Path(directory).resolve() != Path.cwd()
    if not directory or not is_elsewhere or Path(data.path).is_absolute():
        raise missing(data.path)
    fix = "pass the new place with --data.path or --data.mix, or run the command where the run was started"
    raise missing(data.path, f", neither in {directory}, where the run was started, nor in {Path.cwd()}: {fix}")


def base_directory(config: Config) -> str:
    """Return the directory with the relative paths of the data: where the run was started, or the current directory."""
    here = str(Path.cwd())
    paths = [each.path for each in config.data.sources]
    for directory in (config.directory or here, here):
        if all(Path(directory, path).exists() for path in paths):
            return directory
    return config.directory or here


def vocab_size(config: Config) -> int:
    """Return the model's vocabulary size. Shakespeare with the char tokenizer needs no download.

    Raises:
        UserError: if the tokenizer that determines the size cannot be made.
    """
    data = config.data
    if config.model.vocab_size:
        return config.model.vocab_size
    if not (data.path or data.mix) and (data.dataset, data.tokenizer) == ("shakespeare", "char"):
        return SHAKESPEARE_CHARACTERS
    return _tokenizer(config).vocab_size


def _open_mixture(config: Config, tokenizer: Tokenizer, progress: Progress, tokens: int) -> Data:
    """Open the sources of the mixtures that have not ended after a number of training tokens."""
    parts = {}
    for each in remaining_sources(config.data, tokens):
        parts[each.path] = open_data(replace(config, data=each), tokenizer, progress)
    return mixed(config.data, parts)


def _tokenizer(config: Config, given: Tokenizer | None = None) -> Tokenizer:
    """Return `given`, otherwise the tokenizer of a prepared directory, otherwise make `data.tokenizer`.

    `given` keeps its rule for the beginning-of-text token; the tokenizer of a new run follows `data.bos`.
    """
    data = config.data
    if given and data.mix:
        return given  # compared with the tokenizer of each source when it is opened

    sources = [located(each, config.directory) for each in data.sources]
    for each in sources:
        prepared = prepared_tokenizer(Path(each.path), given) if each.path else None
        if prepared:
            return prepared if given else with_bos(prepared, data.bos)
    if given:
        return given

    texts = _texts(config, sources) if data.tokenizer in FROM_TEXT else []
    made = make_tokenizer(data.tokenizer, texts, data.vocab_size, config.model.vocab_size)
    return with_bos(made, data.bos)


def _texts(config: Config, sources: Sequence[DataConfig]) -> list[str]:
    """Read the texts to make a tokenizer from; raise `UserError` if a source is not a text."""
    texts = []
    for each in sources:
        kind = _kind(config, each)
        if kind == "conversations":
            check_conversations(Path(each.path), each.on_error)  # a file without conversations is a different error
        if kind != "text":
            raise UserError(
                f"{each.path} holds {kind}, not text: choose their tokenizer with --data.tokenizer (gpt2, ids or PATH), start "
                f"from a model with --init-from RUN, or tokenize documents with jaxgpt data prepare"
            )
        texts.append(read_text(each).text)
    return texts


def _digests(directory: Path, files: Sequence[Path]) -> dict[str, str]:
    """Return a digest of each file of a directory, keyed by its relative path; {} for a file, or too many files.

    Checkpoints record the paths, so bytes that are not UTF-8 are escaped.
    """
    if not directory.is_dir() or len(files) > FILES:
        return {}
    digests = {}
    for file in files:
        digests[printable(str(file.relative_to(directory)))] = sampled_digest(file)[:16]
    return digests


def _kind(config: Config, data: DataConfig) -> str:
    """Return the kind of data of a source; raise `UserError` if the objective needs a different kind."""
    if data.path and Path(data.path).exists():
        check_kind(Path(data.path))
    post = config.post
    needed = ""
    if post.is_preference:
        needed = "preference pairs"
    elif post.is_rollout:
        needed = "prompts"
    if data.conversations:
        return needed or "conversations"

    kind = "token ids" if data.path and is_token_path(Path(data.path)) else "text"
    if not needed:
        return kind
    if not data.path and data.dataset == "none":
        raise UserError(f"post.objective {post.objective} needs {needed}: add --data.path {needed.split()[-1]}.jsonl")
    source = data.path or f"the built-in text {data.dataset}"
    raise UserError(
        f"post.objective {post.objective} needs {needed} (.jsonl, .json or .parquet), but {source} holds {kind}: pass "
        f"{needed.split()[-1]} with --data.path, or omit post.objective"
    )


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
