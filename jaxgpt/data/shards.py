"""Token shards: write and read a directory with the ids of documents, their tokenizer, and an index.

train_000000.bin, ...   ids (llm.c's format), or train.bin (nanoGPT's); the same for val
tokenizer.json          the tokenizer, and the files that name its special tokens
index.json              settings, counts, checksums; written last, with "complete": true
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxgpt.data.special_tokens import GENERATION, TOKENIZER
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import FROM_TEXT, load_tokenizer, make_tokenizer
from jaxgpt.data.tokens import HEADER, LLMC, is_token_path
from jaxgpt.errors import UserError
from jaxgpt.files import read_json, sha256_file, write_atomically

INDEX, TOKENIZER_FILE = "index.json", "tokenizer.json"
KIND, VERSION = "jaxgpt token shards", 2  # values of "kind" and "version" in index.json
SPLITS = ("train", "val")
BUFFER = 1 << 20  # bytes to write at a time
PROBE = "It's 1,234 o'clock\n\n\tin the  café -- don't <|endoftext|> 東京 we'll\r\n"  # distinguishes tokenizers


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of ids in files: uint16 if all ids fit, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one split. A shard is `NAME.bin.part` until it is complete.

    In llm.c's format, every shard except the last has exactly `shard_tokens` ids: documents continue in the next shard.
    nanoGPT's format is one file without a header.

    Args:
        directory: directory of the shards.
        index: content of index.json. Its entry of the split is updated, and says where to continue.
        split: `train` or `val`.
    """

    def __init__(self, directory: Path, index: Mapping[str, Any], split: str) -> None:
        self.entry: dict[str, Any] = index["splits"][split]
        self._directory, self._split, self._dtype = directory, split, np.dtype(index["dtype"])
        self._has_header = index["format"] == "llm.c"
        self._limit = index["settings"]["shard_tokens"] if self._has_header else 1 << 62
        self._tokens = self.entry["tokens"] - sum(shard["tokens"] for shard in self.entry["shards"])
        self._file = self._reopened() if self._tokens else None

    def write(self, ids: bytes) -> bool:
        """Append ids; return whether a shard is now complete."""
        shards, left = len(self.entry["shards"]), memoryview(ids)
        while left:
            self._file = self._file or self._created()
            taken = left[: (self._limit - self._tokens) * self._dtype.itemsize]
            self._file.write(taken)
            self._tokens += len(taken) // self._dtype.itemsize
            self.entry["tokens"] += len(taken) // self._dtype.itemsize
            left = left[len(taken) :]
            if self._tokens == self._limit:
                self.finish()
        return len(self.entry["shards"]) > shards

    def sync(self) -> None:
        """Write everything to disk."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Complete the last shard, if it has ids."""
        if self._file is None:
            return
        if self._has_header:
            header = np.zeros(HEADER, "<i4")
            magic = next(magic for magic, (_, dtype) in LLMC.items() if dtype == self._dtype)
            header[:3] = magic, LLMC[magic][0], self._tokens
            self._file.seek(0)
            self._file.write(header.tobytes())
        self.sync()
        self._file.close()
        os.replace(self._part, self._path)
        shard = {"file": self._path.name, "tokens": self._tokens, "sha256": sha256_file(self._path)}
        self.entry["shards"].append(shard)
        self._file, self._tokens = None, 0

    def close(self) -> None:
        """Close the file of the unfinished shard."""
        if self._file:
            self._file.close()

    @property
    def _path(self) -> Path:
        number = f"_{len(self.entry['shards']):06d}" if self._has_header else ""
        return self._directory / f"{self._split}{number}.bin"

    @property
    def _part(self) -> Path:
        return self._path.with_name(self._path.name + ".part")

    @property
    def _offset(self) -> int:
        return 4 * HEADER if self._has_header else 0

    def _created(self) -> BinaryIO:
        file = self._part.open("wb", BUFFER)
        file.write(bytes(self._offset))
        return file

    def _reopened(self) -> BinaryIO:
        """Open the unfinished shard, without what was written after the index."""
        if self._path.exists():  # completed after the index was written
            os.replace(self._path, self._part)
        size = self._offset + self._tokens * self._dtype.itemsize
        if not self._part.exists() or self._part.stat().st_size < size:
            raise UserError(f"{self._part} is shorter than in {INDEX}: delete {self._directory} and start again")
        file = self._part.open("r+b", BUFFER)
        file.truncate(size)
        file.seek(size)
        return file


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write a tokenizer and the files that name its special tokens, and return its entry in index.json."""
    for name, content in ((GENERATION, tokenizer.special.generation), (TOKENIZER, tokenizer.special.tokenizer)):
        (directory / name).unlink(missing_ok=True)
        if content:
            write_atomically(directory / name, json.dumps(content, indent=1))
    write_atomically(directory / TOKENIZER_FILE, tokenizer.to_json())
    sha256 = sha256_file(directory / TOKENIZER_FILE)
    return {"file": TOKENIZER_FILE, "sha256": sha256, "vocab_size": tokenizer.vocab_size, "end_id": tokenizer.eos_id}


def write_index(directory: Path, index: Mapping[str, Any]) -> None:
    """Write index.json."""
    write_atomically(directory / INDEX, json.dumps(index, indent=1, ensure_ascii=False) + "\n")


def read_index(directory: Path) -> dict[str, Any] | None:
    """Read index.json; return None if the file is missing or has different content.

    Raises:
        UserError: if a different version of jaxgpt wrote it.
    """
    index = read_json(directory / INDEX) if (directory / INDEX).is_file() else {}
    if index.get("kind") != KIND:
        return None
    if index.get("version") != VERSION:
        raise UserError(
            f"{directory / INDEX} has version {index.get('version')}, not {VERSION}: prepare the data again"
        )
    if missing := {"complete", "pieces", "settings", "sources", "splits"} - index.keys():
        raise UserError(f"{directory / INDEX} is damaged: {min(missing)!r} is missing; prepare the data again")
    return index


def saved_tokenizer(directory: Path, index: Mapping[str, Any]) -> Tokenizer:
    """Load the tokenizer of a directory.

    Raises:
        UserError: if the file has changed.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file() or sha256_file(path) != index["tokenizer"]["sha256"]:
        raise UserError(f"{path} is missing or does not match {INDEX}: prepare the data again")
    return load_tokenizer(path)


def check_files(directory: Path, index: Mapping[str, Any], checksums: bool = False) -> None:
    """Compare the files of a directory with the sizes, or the checksums too, in its index.

    Raises:
        UserError: if they differ.
    """
    fix = f"prepare the data again, or delete {INDEX} to read the .bin files without it"
    itemsize, offset = np.dtype(index["dtype"]).itemsize, 4 * HEADER if index["format"] == "llm.c" else 0
    shards = {shard["file"]: shard for split in SPLITS for shard in index["splits"][split]["shards"]}
    for name, shard in shards.items():
        path, size = directory / name, offset + shard["tokens"] * itemsize
        if not path.is_file():
            raise UserError(f"{path} is missing: {fix}")
        if path.stat().st_size != size:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes, not {size:,} as in {INDEX}: {fix}")
        if checksums and sha256_file(path) != shard["sha256"]:
            raise UserError(f"{path} does not match its SHA-256 in {INDEX}: {fix}")
    if others := sorted({path.name for path in directory.glob("[!.]*.bin")} - shards.keys()):
        raise UserError(f"{directory / others[0]} is not in {INDEX}: {fix}")


def complete_index(path: Path) -> dict[str, Any] | None:
    """Read the index of a directory written by `jaxgpt data prepare`, and compare it with the sizes of the files.

    Returns:
        The index, or None if the path is something else.

    Raises:
        UserError: if the index is damaged or contradicts the files, or the directory is unfinished.
    """
    index = read_index(path)
    if index and not index["complete"]:
        raise UserError(f"{path} is unfinished: run its jaxgpt data prepare command again, which continues it")
    if index:
        try:
            check_files(path, index)
        except (KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path / INDEX} is damaged ({type(e).__name__}: {e}): prepare the data again") from None
    return index


def holds_ids(path: Path) -> bool:
    """Return whether a path is a token file, a directory of token files, or one written by `jaxgpt data prepare`."""
    return complete_index(path) is not None or is_token_path(path)


def prepared_tokenizer(path: Path, kind: str, tokenizer: Tokenizer | None = None) -> Tokenizer | None:
    """Return the tokenizer of a directory written by `jaxgpt data prepare`, or None if the path is something else.

    Args:
        path: path of the data.
        kind: `data.tokenizer`. Kinds that are made from text (char, word and bpe) are ignored; others must match.
        tokenizer: an existing tokenizer that must match, such as the tokenizer of a resumed run.

    Raises:
        UserError: if the tokenizers differ, or the index contradicts the files.
    """
    index = complete_index(path)
    if index is None:
        return None
    own, used = saved_tokenizer(path, index), index["tokenizer"]["name"]
    named = "the tokenizer of the model" if tokenizer else f"data.tokenizer {kind}"
    if tokenizer is None and kind not in (*FROM_TEXT, used, str(path / TOKENIZER_FILE)):
        if kind == "ids":
            raise UserError(f"{path} has a tokenizer, {path / TOKENIZER_FILE}: omit --data.tokenizer ids")
        tokenizer = make_tokenizer(kind)
    if tokenizer is not None and not same_ids(tokenizer, own):
        raise UserError(
            f"{path} was prepared with a different tokenizer ({used}, {TOKENIZER_FILE}) than {named}: omit "
            f"--data.tokenizer, or prepare the data with this tokenizer"
        )
    return tokenizer or own


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids: equal files, or equal vocabularies, merges, and ids of a probe."""
    if a.to_json() == b.to_json():
        return True
    models = [json.loads(each.to_json())["model"] for each in (a, b)]
    is_equal = all(models[0].get(key) == models[1].get(key) for key in ("type", "vocab", "merges"))
    return is_equal and np.array_equal(a.encode(PROBE), b.encode(PROBE))
