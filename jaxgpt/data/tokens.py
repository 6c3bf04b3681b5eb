"""Ids on disk: nanoGPT's raw files and llm.c's two formats, recognised by their first bytes and mapped, not read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UserError

HEADER = 256  # int32 numbers before the ids of an llm.c file
FIRST = 1 << 20  # ids of each file that are checked at once; the others are as they are read
ZIP, TORCH = (
    b"PK\x03\x04",
    bytes.fromhex("80028a0a6cfc9c46f920"),
)  # how torch's files begin, those of today and old ones
LLMC: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}  # magic: (version, type)


class Tokens:
    """A long row of ids, in memory or mapped from one or more files.

    Attributes:
        parts: arrays that stand one behind the other.
        vocab_size: ids are below it.
    """

    def __init__(self, parts: Sequence[np.ndarray], vocab_size: int = 2**31) -> None:
        self.parts = [p for p in parts if len(p)]
        self.vocab_size = vocab_size
        self._ends = np.cumsum([len(p) for p in self.parts], dtype=np.int64)

    def below(self, vocab_size: int) -> Tokens:
        """The same row, of ids below `vocab_size`: the first million of each file now, the others when they are taken.

        Raises:
            UserError: an id is not below it.
        """
        for part in self.parts:
            _check(part[:FIRST], vocab_size)
        return Tokens(self.parts, vocab_size)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    def take(self, start: int, n: int) -> np.ndarray:
        """Ids `start` to `start + n` as int32, copied.

        Raises:
            UserError: one of them is not in the vocabulary (jax would take another one instead, and say nothing).
        """
        out, filled = np.empty(n, np.int32), 0
        part = int(np.searchsorted(self._ends, start, side="right"))
        while filled < n:
            begin = int(self._ends[part]) - len(self.parts[part])
            piece = self.parts[part][start + filled - begin :][: n - filled]
            _check(piece, self.vocab_size)
            out[filled : filled + len(piece)] = piece
            filled, part = filled + len(piece), part + 1
        return out

    def fingerprint(self) -> str:
        """Hash the ids: SHA-256, in hexadecimal, of their number and of at most 256 blocks of 16,384 ids.

        The blocks are spread evenly and include both ends; up to 4 million ids every id is hashed. Of larger files only
        these blocks are read, so that a corpus of any size takes a fraction of a second.
        """
        n, block, blocks = len(self), 1 << 14, 256
        spread = np.linspace(0, max(n - block, 0), blocks, dtype=np.int64)
        starts = range(0, n, block) if n <= block * blocks else spread
        digest = hashlib.sha256(str(n).encode())
        every = Tokens(self.parts)  # out-of-range ids are refused elsewhere
        for start in starts:
            digest.update(every.take(int(start), min(block, n - int(start))).astype("<i4").tobytes())
        return digest.hexdigest()

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """What stands before id `at`, and the rest."""
        before, after, begin = [], [], 0
        for part in self.parts:
            cut = min(max(at - begin, 0), len(part))
            before.append(part[:cut])
            after.append(part[cut:])
            begin += len(part)
        return Tokens(before, self.vocab_size), Tokens(after, self.vocab_size)


def is_token_path(path: Path) -> bool:
    """Whether a path names token files: a `.bin`, or a folder that holds some."""
    return path.suffix == ".bin" or (path.is_dir() and any(path.glob("*.bin")))


def open_splits(path: Path, train_fraction: float) -> tuple[Tokens, Tokens, str]:
    """Training and validation ids, and a line that says what they are.

    A folder's files are told apart by `train` and `val` in their names; one file, or a folder without `val`, is split.

    Raises:
        UserError: missing, empty, or of a format that is not known.
    """
    if path.is_file():
        files = {"train": [path], "val": []}
    elif path.is_dir():
        names = sorted(path.glob("*.bin"))
        files = {split: [p for p in names if split in p.name] for split in ("train", "val")}
        if not files["train"]:
            raise UserError(f"no token file in {path} has 'train' in its name: train.bin and val.bin are expected")
    else:
        raise UserError(f"no such file or folder: {path}")
    train = Tokens([open_tokens(p) for p in files["train"]])
    if files["val"]:
        val = Tokens([open_tokens(p) for p in files["val"]])
    else:
        train, val = train.split(int(train_fraction * len(train)))
    return train, val, f"{len(files['train']) + len(files['val'])} token file(s) at {path}"


def open_tokens(path: Path) -> np.ndarray:
    """The ids of one file, mapped into memory.

    nanoGPT: nothing but little-endian uint16. llm.c: 256 int32 first, magic, version and number of ids among them, then
    uint16 (GPT-2) or uint32 (Llama 3).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            head = f.read(4 * HEADER)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if size == 0:
        raise UserError(f"{path} is empty")
    if head.startswith((ZIP, TORCH)):
        raise UserError(f"{path} is a file of torch's, or another archive, not of ids: refused, and not opened as one")
    if len(head) == 4 * HEADER:
        magic, version, count = (int(n) for n in np.frombuffer(head, "<i4", 3))
        if magic in LLMC:
            known, dtype = LLMC[magic]
            if version != known:
                raise UserError(f"{path}: llm.c token file of version {version}, only {known} is known")
            if size != 4 * HEADER + count * dtype.itemsize:
                raise UserError(f"{path}: its header promises {count:,} ids, its size of {size:,} bytes is not theirs")
            return np.memmap(path, dtype, "r", 4 * HEADER, (count,))
    if size % 2:
        raise UserError(f"{path}: {size:,} bytes are no row of 16-bit ids, and no header of llm.c stands before them")
    return np.memmap(path, np.dtype("<u2"), "r")


def _check(ids: np.ndarray, vocab_size: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        where = f"{ids.filename}: " if isinstance(ids, np.memmap) else ""
        raise UserError(f"{where}id {wrong} is beyond the vocabulary of {vocab_size}: another tokenizer made these")
