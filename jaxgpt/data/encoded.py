"""Encode a whole text in bounded memory, once: ids are kept in the cache folder, and mapped from there next time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock

from jaxgpt.cache import cache_dir
from jaxgpt.data.corpus import Progress, Text, no_progress
from jaxgpt.data.encode import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.data.pieces import rejoin
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import parse_json

FORMAT = 1  # of the files, and of what this module and `pieces` make of a text
SMALLEST = 1 << 20  # bytes of a text from which on its ids are kept: others are encoded within a second
CACHE_BYTES = 16 * 2**30  # beyond this, the files that were not used for longest make room
ENDING = 40  # bytes at the end of a file: SHA-256 of all before it, and the length of the JSON before that


@dataclass(frozen=True)
class Encoded:
    """The ids of a text.

    Attributes:
        tokens: the ids.
        blocks: int64 `[n, 2]`: how many bytes and how many ids come before the end of each block of the text.
    """

    tokens: Tokens
    blocks: np.ndarray


def encode_text(tokenizer: Tokenizer, text: Text, progress: Progress = no_progress) -> Encoded:
    """Encode a text, or find its ids in the cache.

    The ids of a byte tokenizer are the text itself. Characters are quick to encode; of other tokenizers the ids are kept
    in `cache_dir()/tokens`, which may be deleted at any time. A file that is damaged is written anew. Where the cache
    cannot be written, ids stay in memory.

    Args:
        tokenizer: of the text.
        text: to encode.
        progress: called with the bytes that are done.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return Encoded(Tokens([np.frombuffer(text.data, np.uint8)]), np.array([[len(text.data)] * 2]))
    if isinstance(tokenizer, CharTokenizer) or len(text.data) < SMALLEST:
        return _in_memory(tokenizer, text, progress)
    path = cache_dir() / "tokens" / f"{_key(tokenizer, text)}.ids"
    if found := _read(path):
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of several processes with one text, one encodes it and the others wait.
        with FileLock(path.with_suffix(".lock")):
            if not (found := _read(path)):
                _write(path, tokenizer, text, progress)
                found = _read(path)
    except (OSError, NotImplementedError):  # read-only, full, or without locks
        found = None
    return found or _in_memory(tokenizer, text, progress)


def count_bytes(tokenizer: Tokenizer, text: Text, encoded: Encoded, begin: int) -> int:
    """Count the bytes of a text, in UTF-8, from id number `begin` to its end."""
    if isinstance(tokenizer, ByteTokenizer) or begin >= len(encoded.tokens):
        return max(len(text.data) - begin, 0) if isinstance(tokenizer, ByteTokenizer) else 0
    ends = encoded.blocks
    block = int(np.searchsorted(ends[:, 1], begin, side="right"))
    start, first = ends[block - 1].tolist() if block else (0, 0)
    part = bytes(memoryview(text.data)[start : int(ends[block, 0])]).decode("utf-8")
    return len(text.data) - start - tokenizer.offset(part, begin - first)


def _blocks(tokenizer: Tokenizer, text: Text, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
    """The ids of each block of a text in the smallest type that holds them, with the length of the block in bytes."""
    dtype = np.min_scalar_type(max(tokenizer.vocab_size - 1, 0)).newbyteorder("<")
    for pieces in rejoin(text.blocks(progress=progress), tokenizer.find):
        yield sum(len(piece.encode()) for piece in pieces), tokenizer.encode_pieces(pieces).astype(dtype)


def _in_memory(tokenizer: Tokenizer, text: Text, progress: Progress) -> Encoded:
    sizes, parts = [], []
    for size, ids in _blocks(tokenizer, text, progress):
        sizes.append((size, len(ids)))
        parts.append(ids)
    return Encoded(Tokens(parts), np.cumsum(np.array(sizes, np.int64).reshape(-1, 2), axis=0))


def _key(tokenizer: Tokenizer, text: Text) -> str:
    """A name for the ids that a text has by a tokenizer, in this version of the library."""
    parts = str(FORMAT), version("tokenizers"), tokenizer.to_json(), text.sha256
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _write(path: Path, tokenizer: Tokenizer, text: Text, progress: Progress) -> None:
    """Write a file, whole or not at all: little-endian ids, a JSON object about them, its checksum, the object's length."""
    digest, sizes, dtype = hashlib.sha256(), [], "<u1"
    with _replacing(path) as out:
        for size, ids in _blocks(tokenizer, text, progress):
            data, dtype = ids.tobytes(), ids.dtype.str
            out.write(data)
            digest.update(data)
            sizes.append([size, len(ids)])
        about = json.dumps({"dtype": dtype, "blocks": sizes}).encode()
        digest.update(about)
        out.write(about + digest.digest() + len(about).to_bytes(8, "little"))
    _make_room(path)


def _read(path: Path) -> Encoded | None:
    """Map the ids of a file; None if it is not there or not what was written."""
    try:
        with path.open("rb") as f:
            end = f.seek(0, os.SEEK_END) - ENDING
            f.seek(max(end, 0))
            ending = f.read()
            length = int.from_bytes(ending[32:], "little")
            f.seek(0)
            digest, left = hashlib.sha256(), end
            while left > 0 and (part := f.read(min(left, 1 << 20))):
                digest.update(part)
                left -= len(part)
            if digest.digest() != ending[:32] or length > end:
                return None
            f.seek(end - length)
            about = parse_json(f.read(length), str(path))
            sizes, dtype = np.array(about["blocks"], np.int64).reshape(-1, 2), np.dtype(about["dtype"])
            if int(sizes[:, 1].sum()) * dtype.itemsize != end - length or dtype.kind != "u":
                return None
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used
        ids = np.memmap(path, dtype, "r", shape=((end - length) // dtype.itemsize,))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return Encoded(Tokens([ids]), np.cumsum(sizes, axis=0))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when it is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as out:
        try:
            yield out  # type: ignore[misc]
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(out.name)
            raise


def _make_room(keep: Path) -> None:
    """Delete the files that were used longest ago until `CACHE_BYTES` hold the rest, and what killed writers left."""
    with contextlib.suppress(OSError):
        for path in keep.parent.glob("*.tmp"):
            if path.stat().st_mtime < time.time() - 24 * 3600:
                path.unlink()
        files = sorted(keep.parent.glob("*.ids"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total > CACHE_BYTES and path != keep:
                total -= path.stat().st_size
                path.unlink()
                path.with_suffix(".lock").unlink(missing_ok=True)
