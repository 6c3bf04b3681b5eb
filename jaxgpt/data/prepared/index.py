"""index.json of a directory of token shards: its entries, and how it is read and written with its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from jaxgpt.atomic import write_json
from jaxgpt.data.token_files import HEADER_BYTES
from jaxgpt.directories import INDEX, PREPARED
from jaxgpt.errors import UserError, reported
from jaxgpt.files import read_json

KIND = f"{PREPARED}, version 4"
SPLITS = ("train", "val")
FIX = f"prepare the data in an empty directory, or delete {INDEX} to read the .bin files without it"


class ShardEntry(TypedDict):
    """A complete shard."""

    file: str
    tokens: int
    sha256: str


class SplitEntry(TypedDict):
    """A split as written so far; an interrupted command resumes at this position."""

    documents: int
    tokens: int
    bytes: int  # bytes of text
    shards: list[ShardEntry]


class TokenizerEntry(TypedDict):
    """The tokenizer; `bos` is the text of the ids before each document."""

    name: str
    sha256: str
    vocab_size: int
    end_id: int | None
    bos: str


class SourceEntry(TypedDict):
    """A source of documents (`sources.Source`)."""

    name: str
    files: int  # number of files
    size: int  # bytes of all files
    fingerprint: str  # SHA-256 of names, sizes and modification times
    content: NotRequired[str]  # SHA-256 of names, sizes and samples of the content; missing in an index of jaxgpt 0.1.0


class SettingsEntry(TypedDict):
    """Parameters and sources that a command must repeat to continue, because they affect the written bytes."""

    tokenizer: str
    vocab_size: int
    format: str
    shard_tokens: int
    val_fraction: float
    field: str
    tokenizer_sha256: str
    sources: list[SourceEntry]
    # Missing in an index of jaxgpt 0.1.0:
    separator: NotRequired[str]
    dedup: NotRequired[str]
    min_characters: NotRequired[int]
    bos_ids: NotRequired[list[int]]  # ids before each document


class SkipGroup(TypedDict):
    """Errors of a file that differ only in numbers and names."""

    file: str
    lost: str  # document, file or rest, as in `document_piece.Lost`
    kind: str  # the error without its numbers and names
    number: int
    first: str  # the first error


class Skips(TypedDict):
    """Unreadable documents and files."""

    documents: int
    files: int
    first: list[str]  # the first errors
    groups: list[SkipGroup]


class Index(TypedDict):
    """The content of index.json, without its checksum."""

    kind: str  # `KIND`
    complete: bool
    settings: SettingsEntry
    pieces: int  # number of pieces written, dropped or skipped so far
    skipped: Skips
    dropped: dict[str, int]  # number of documents that are `short` or `repeated`
    markers: int  # number of end-of-text tokens written as text
    splits: dict[str, SplitEntry]  # keyed by `SPLITS`
    dtype: NotRequired[str]  # type of the ids; missing until the tokenizer is known
    tokenizer: NotRequired[TokenizerEntry]  # missing until the tokenizer is known


def write_index(directory: Path, index: Index) -> None:
    """Write index.json, with its checksum as the last entry."""
    write_json(directory / INDEX, {**index, "sha256": _checksum(index)})


def read_index(directory: Path) -> Index | None:
    """Read index.json; return None if the file is missing, or from a different program or version.

    Raises:
        UserError: if the index does not match its own checksum, or is unreadable and there are .bin files.
    """
    try:
        with reported(f"cannot read {directory}"):
            has_index = (directory / INDEX).is_file()
        index = read_json(directory / INDEX) if has_index else {}
    except UserError:
        if any(directory.glob("*.bin")):
            raise
        return None  # the index.json of a different program
    if index.get("kind") != KIND:
        return None
    if index.pop("sha256", "") != _checksum(index):
        raise UserError(f"{directory / INDEX} does not match its own checksum: {FIX}")
    return cast(Index, index)


def _checksum(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def ids_offset(index: Index) -> int:
    """Return the size of the header of a shard in bytes; 0 in nanoGPT's format."""
    return HEADER_BYTES if index["settings"]["format"] == "llm.c" else 0
