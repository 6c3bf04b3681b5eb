"""Token shards: write and read a directory with the ids of documents, their tokenizer, and an index.

train_000000.bin, ...   ids (llm.c's format), or train.bin (nanoGPT's); the same for val
tokenizer.json          the tokenizer; next to it, the files that define its special tokens
index.json              settings, counts, checksums; updated with the shards; at the end, "complete": true
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxgpt.data.index import FIX, SPLITS, Index, SplitEntry, ids_offset, read_index
from jaxgpt.data.same_ids import same_ids
from jaxgpt.data.token_files import LLMC
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import load_saved_tokenizer
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file

TOKENIZER_FILE = "tokenizer.json"
BUFFER = 1 << 20  # buffer size of a shard's file in bytes


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of the ids in shards: uint16 if all ids fit, otherwise uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Write the shards of one split.

    In llm.c's format, every shard except the last has exactly `shard_tokens` ids: documents continue in the next shard.
    nanoGPT's format is one file without a header. Every write updates the entry of the split in `index`, the resume
    position of an interrupted command.
    """

    def __init__(self, directory: Path, index: Index, split: str) -> None:
        self.entry: SplitEntry = index["splits"][split]
        self._directory = directory
        self._split = split
        self._dtype = np.dtype(index["dtype"])
        self._offset = ids_offset(index)
        self._limit = index["settings"]["shard_tokens"] if self._offset else 1 << 62
        self._tokens = self.entry["tokens"] - sum(shard["tokens"] for shard in self.entry["shards"])
        self._file = self._opened() if self._tokens else None

    def write(self, ids: bytes) -> bool:
        """Append ids, as bytes of the index's dtype; return whether a shard was completed."""
        shards = len(self.entry["shards"])
        left = memoryview(ids)
        while left:
            self._file = self._file or self._opened()
            taken = left[: (self._limit - self._tokens) * self._dtype.itemsize]
            self._file.write(taken)
            self._tokens += len(taken) // self._dtype.itemsize
            self.entry["tokens"] += len(taken) // self._dtype.itemsize
            left = left[len(taken) :]
            if self._tokens == self._limit:
                self.finish()
        return len(self.entry["shards"]) > shards

    def sync(self) -> None:
        """Flush the unfinished shard to disk."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Complete the unfinished shard, if any: write its header (llm.c's format), and record its checksum."""
        if self._file is None:
            return
        if self._offset:
            [(magic, version)] = [(magic, version) for magic, (version, dtype) in LLMC.items() if dtype == self._dtype]
            self._file.seek(0)
            self._file.write(np.array([magic, version, self._tokens], "<i4").tobytes())
        self.sync()
        self._file.close()
        sha256 = sha256_file(self._path)
        self.entry["shards"].append({"file": self._path.name, "tokens": self._tokens, "sha256": sha256})
        self._file = None
        self._tokens = 0

    def close(self) -> None:
        """Close the file of the unfinished shard."""
        if self._file:
            self._file.close()

    @property
    def _path(self) -> Path:
        number = f"_{len(self.entry['shards']):06d}" if self._offset else ""
        return self._directory / f"{self._split}{number}.bin"

    def _opened(self) -> BinaryIO:
        """Open the current shard, truncated to the length recorded in the index."""
        size = self._offset + self._tokens * self._dtype.itemsize
        if self._tokens and not (self._path.is_file() and self._path.stat().st_size >= size):
            fix = f"delete {self._directory} and start again"
            raise UserError(f"{self._path} is missing or shorter than in {INDEX}: {fix}")
        file = self._path.open("r+b" if self._tokens else "wb", BUFFER)
        file.truncate(size)
        file.seek(size)
        return file


def saved_tokenizer(directory: Path, index: Index) -> Tokenizer:
    """Load the tokenizer of a directory; raise `UserError` if the file is missing or has changed."""
    path = directory / TOKENIZER_FILE
    if not path.is_file() or sha256_file(path) != index["tokenizer"]["sha256"]:
        raise UserError(f"{path} is missing or does not match {INDEX}: prepare the data in an empty directory")
    return load_saved_tokenizer(path)


def check_files(directory: Path, index: Index, checksums: bool = False) -> None:
    """Raise `UserError` if the names, sizes or (with `checksums`) SHA-256 of .bin files differ from the index."""
    itemsize = np.dtype(index["dtype"]).itemsize
    offset = ids_offset(index)
    shards = {shard["file"]: shard for split in SPLITS for shard in index["splits"][split]["shards"]}
    for name, shard in shards.items():
        path = directory / name
        size = offset + shard["tokens"] * itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path} is missing, or does not have {size:,} bytes as in {INDEX}: {FIX}")
        if checksums and sha256_file(path) != shard["sha256"]:
            raise UserError(f"{path} does not match its SHA-256 in {INDEX}: {FIX}")

    found = {path.name for path in directory.glob("[!.]*.bin")}
    others = sorted(found - shards.keys())
    if others:
        raise UserError(f"{directory / others[0]} is not in {INDEX}: {FIX}")


def prepared_tokenizer(path: Path, given: Tokenizer | None = None) -> Tokenizer | None:
    """Return `given`, otherwise the tokenizer of a prepared directory; None for any other path.

    Raises:
        UserError: if the directory is unfinished, its files differ from the index, or `given` produces different ids.
    """
    index = read_index(path)
    if index is None:
        return None
    if not index["complete"]:
        raise UserError(f"{path} is unfinished: run its jaxgpt data prepare command again to continue")
    check_files(path, index)
    own = saved_tokenizer(path, index)
    if given and not same_ids(given, own):
        raise UserError(
            f"{path} was prepared with a different tokenizer ({index['tokenizer']['name']}) than the model's: prepare the "
            f"data with the tokenizer of the model"
        )
    return given or own


def prepared_bos(path: Path) -> tuple[int, ...] | None:
    """Return the beginning-of-text ids of each document of a prepared directory; None for any other path."""
    index = read_index(path) if path.is_dir() else None
    if index is None:
        return None
    return tuple(index["settings"].get("bos_ids", ()))  # an index of jaxgpt 0.1.0 has no bos_ids
