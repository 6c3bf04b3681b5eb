"""Encode a whole text in bounded memory and cache the ids, which are memory-mapped the next time."""

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

from jaxgpt.data.corpus import Progress, Text, no_progress
from jaxgpt.data.encode import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.data.pieces import rejoin
from jaxgpt.data.tokens import Tokens
from jaxgpt.files import cache_dir, parse_json

FORMAT = 1  # version of the file format and of how this module and `pieces` encode a text
SMALLEST = 1 << 20  # bytes of text from which ids are cached; shorter texts are encoded within a second
SMALLEST_CHAR = 1 << 26  # the same for characters, which are quicker to encode
CACHE_BYTES = 16 * 2**30  # beyond this size, the least recently used files are deleted
ENDING = 40  # bytes at the end of a file: SHA-256 of everything before, and the length of the JSON before that


@dataclass(frozen=True)
class Encoded:
    """The ids of a text.

    Attributes:
        tokens: the ids.
        blocks: int64 `[n, 2]`, the numbers of bytes and of ids up to the end of each block of the text.
    """

    tokens: Tokens
    blocks: np.ndarray


def encode_text(tokenizer: Tokenizer, text: Text, progress: Progress = no_progress) -> Encoded:
    """Encode a text, or load its ids from the cache.

    The ids of a byte tokenizer are the text itself. Those of other tokenizers are cached in `cache_dir()/tokens`, which can
    be deleted at any time, unless the text is short. A damaged file is replaced. If the cache cannot be written, the ids are
    kept in memory.

    Args:
        tokenizer: the tokenizer.
        text: the text to encode.
        progress: called with the number of bytes encoded so far and the total.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return Encoded(Tokens([np.frombuffer(text.data, np.uint8)]), np.array([[len(text.data)] * 2]))
    if len(text.data) < (SMALLEST_CHAR if isinstance(tokenizer, CharTokenizer) else SMALLEST):
        return _in_memory(tokenizer, text, progress)
    path = cache_dir() / "tokens" / f"{_key(tokenizer, text)}.ids"
    if found := _read(path):
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # If several processes need the same text, one encodes it and the others wait.
        with FileLock(path.with_suffix(".lock")):
            if not (found := _read(path)):
                _write(path, tokenizer, text, progress)
                found = _read(path)
    except (OSError, NotImplementedError):  # the file system is read-only or full, or has no locks
        found = None
    return found or _in_memory(tokenizer, text, progress)


def count_bytes(tokenizer: Tokenizer, text: Text, encoded: Encoded, begin: int) -> int:
    """Count the UTF-8 bytes of a text from id number `begin` to its end."""
    if isinstance(tokenizer, ByteTokenizer) or begin >= len(encoded.tokens):
        return max(len(text.data) - begin, 0) if isinstance(tokenizer, ByteTokenizer) else 0
    ends = encoded.blocks
    block = int(np.searchsorted(ends[:, 1], begin, side="right"))
    start, first = ends[block - 1].tolist() if block else (0, 0)
    part = bytes(memoryview(text.data)[start : int(ends[block, 0])]).decode("utf-8")
    return len(text.data) - start - tokenizer.offset(part, begin - first)


def _blocks(tokenizer: Tokenizer, text: Text, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the length in bytes and the ids of each block of a text, in the smallest sufficient dtype."""
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
    """Hash everything that determines the ids: text, tokenizer, library version and file format."""
    parts = str(FORMAT), version("tokenizers"), tokenizer.to_json(), text.sha256
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _write(path: Path, tokenizer: Tokenizer, text: Text, progress: Progress) -> None:
    """Write a cache file atomically: little-endian ids, a JSON object, a checksum, and the length of the JSON."""
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
    """Memory-map the ids of a cache file; None if it is missing or damaged."""
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
            os.utime(path)  # records the time of last use
        ids = np.memmap(path, dtype, "r", shape=((end - length) // dtype.itemsize,))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return Encoded(Tokens([ids]), np.cumsum(sizes, axis=0))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds."""
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
    """Delete the least recently used files beyond `CACHE_BYTES`, and leftovers of killed writers."""
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
