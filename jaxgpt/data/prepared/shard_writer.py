"""Writer of token shards, which can continue at the position that the index records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxgpt.data.prepared.index import Index, SplitEntry, ids_offset
from jaxgpt.data.token_files import LLMC
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file

BUFFER = 1 << 20  # buffer size of a shard's file in bytes


class ShardWriter:
    """Writes the shards of one split.

    In llm.c's format, every shard except the last has exactly `shard_tokens` ids: documents continue in the next shard.
    nanoGPT's format is one file without a header. Every write updates the entry of the split in `index`, the resume
    position of an interrupted command.
    """

    def __init__(self, directory: Path, index: Index, split: str) -> None:
        self.entry: SplitEntry = index["splits"][split]
        self._directory = directory
        self._split = split
        self._dtype = np.dtype(index["dtype"])
        self._is_llmc = index["settings"]["format"] == "llm.c"
        self._header_bytes = ids_offset(index)
        self._limit = index["settings"]["shard_tokens"] if self._is_llmc else 1 << 62  # maximum tokens in a shard
        complete = sum(shard["tokens"] for shard in self.entry["shards"])
        self._tokens = self.entry["tokens"] - complete  # tokens in the current shard
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
        if self._is_llmc:
            [magic] = [magic for magic, (_, dtype) in LLMC.items() if dtype == self._dtype]
            version, _ = LLMC[magic]
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
        number = f"_{len(self.entry['shards']):06d}" if self._is_llmc else ""
        return self._directory / f"{self._split}{number}.bin"

    def _opened(self) -> BinaryIO:
        """Open the current shard, truncated to the length recorded in the index."""
        size = self._header_bytes + self._tokens * self._dtype.itemsize
        if self._tokens and not (self._path.is_file() and self._path.stat().st_size >= size):
            fix = f"delete {self._directory} and start again"
            raise UserError(f"{self._path} is missing or shorter than in {INDEX}: {fix}")
        file = self._path.open("r+b" if self._tokens else "wb", BUFFER)
        file.truncate(size)
        file.seek(size)
        return file
