"""Check a directory of token shards (ids of documents, their tokenizer, and an index), and load its tokenizer.

train_000000.bin, ...   ids (llm.c's format), or train.bin (nanoGPT's); the same for val
tokenizer.json          the tokenizer; next to it, the files that define its special tokens
index.json              settings, counts, checksums; updated with the shards; at the end, "complete": true
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.prepared.index import FIX, SPLITS, Index, ids_offset, read_index
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import load_saved_tokenizer
from jaxgpt.data.tokenizers.same_ids import same_ids
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file

TOKENIZER_FILE = "tokenizer.json"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of the ids in shards: uint16 if all ids fit, otherwise uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


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
            "data with the tokenizer of the model"
        )
    return given or own


def prepared_bos(path: Path) -> tuple[int, ...] | None:
    """Return the beginning-of-text ids of each document of a prepared directory; None for any other path."""
    index = read_index(path) if path.is_dir() else None
    if index is None:
        return None
    return tuple(index["settings"].get("bos_ids", ()))  # an index of jaxgpt 0.1.0 has no bos_ids
