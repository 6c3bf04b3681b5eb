"""Token ids: the splits that batches are read from, and token files in nanoGPT's and llm.c's formats, memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.config import MAX_VOCAB
from jaxgpt.errors import UserError, reported
from jaxgpt.files import missing

HEADER = 256  # int32 numbers in the header of an llm.c file
WINDOWS_PER_BLOCK = 32  # windows of documents to process at a time: they fit in the CPU's cache
CHECKED_IDS = 1 << 20  # ids of each file to check when it is opened; the others are checked when they are read
HASHED_IDS, HASHED_BLOCKS = 1 << 14, 256  # ids of each block of a fingerprint, and their number
SPLIT_WORDS = {"train": {"train", "training"}, "val": {"val", "valid", "validation"}}
NOT_COUNTED = ("index.json", "tokenizer.json")  # files of `jaxgpt data prepare` next to the shards
LLMC: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}  # magic: (version, type)


class Split(Protocol):
    """Token ids of a split, read in windows: `Tokens`, `Packed` or `Mixture`."""

    @property
    def segmented(self) -> bool:
        """Whether windows are `[T, 3]` (input, target, segment id) instead of `[T + 1]`."""
        ...

    def __len__(self) -> int: ...
    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the ids `start` to `start + n`, int32."""
        ...

    def starts(self, block_size: int) -> int:
        """Count the positions at which a complete window can start."""
        ...

    def eval_starts(self, block_size: int, stride: int) -> Sequence[int] | np.ndarray:
        """Return the starts of the windows of the whole split, `stride` apart."""
        ...

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts`, int32."""
        ...


class Tokens:
    """A sequence of token ids, in memory or mapped from files.

    Attributes:
        parts: arrays; their concatenation is the sequence.
        vocab_size: all ids are smaller.
        end_ids: ids that end a document; empty: documents are not separated.
    """

    def __init__(self, parts: Sequence[np.ndarray], vocab_size: int = 2**31, end_ids: tuple[int, ...] = ()) -> None:
        self.parts = [p for p in parts if len(p)]
        self.vocab_size, self.end_ids = vocab_size, end_ids
        self._ends = list(itertools.accumulate(map(len, self.parts)))
        self._plain = [np.asarray(p) for p in self.parts]  # a slice of a memmap costs as much as copying a window
        self._maps = [_mapping(p) for p in self.parts]

    def __len__(self) -> int:
        return self._ends[-1] if self.parts else 0

    def check_ids(self, vocab_size: int, tokenizer_size: int = 0) -> Tokens:
        """Return the same ids, required to be below `vocab_size`: the first ones now, the others when they are read.

        Args:
            vocab_size: vocabulary size of the model, which may be padded.
            tokenizer_size: vocabulary size of the tokenizer; 0: same as the model's. `MAX_VOCAB`: unknown.

        Raises:
            UserError: if an id is out of range, or a file without a header, with 16-bit ids, cannot have all ids.
        """
        large = 1 << 16 < (tokenizer_size or vocab_size) < MAX_VOCAB
        for part in self.parts:
            if large and isinstance(part, np.memmap) and part.itemsize == 2 and not part.offset:
                raise UserError(
                    f"{part.filename} has no header and is read as 16-bit ids, too few for a vocabulary of "
                    f"{tokenizer_size or vocab_size:,}: write 32-bit ids in llm.c's format (a header of 256 int32: 20240801, "
                    f"7, number of ids)"
                )
            _check(part[:CHECKED_IDS], part, vocab_size)
        return Tokens(self.parts, vocab_size, self.end_ids)

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Split into the ids before index `at` and the other ids."""
        cuts = [min(max(at - end + len(part), 0), len(part)) for part, end in zip(self.parts, self._ends, strict=True)]
        before = [part[:cut] for part, cut in zip(self.parts, cuts, strict=True)]
        after = [part[cut:] for part, cut in zip(self.parts, cuts, strict=True)]
        return Tokens(before, self.vocab_size, self.end_ids), Tokens(after, self.vocab_size, self.end_ids)

    def contains(self, values: tuple[int, ...]) -> bool:
        """Return whether any id equals one of a few values."""
        return any(
            is_any(part[start : start + CHECKED_IDS], values).any()
            for part in self.parts
            for start in range(0, len(part), CHECKED_IDS)
        )

    def fingerprint(self) -> str:
        """Hash the ids: SHA-256, in hexadecimal, of their number and of at most 256 evenly spaced blocks of 16,384 ids.

        Up to 4 million ids, every id is hashed. A corpus of any size takes a fraction of a second.
        """
        n, digest = len(self), hashlib.sha256(str(len(self)).encode())
        spaced = np.linspace(0, max(n - HASHED_IDS, 0), HASHED_BLOCKS, dtype=np.int64)
        for start in range(0, n, HASHED_IDS) if n <= HASHED_IDS * HASHED_BLOCKS else spaced.tolist():
            digest.update(self.take(start, min(HASHED_IDS, n - start)).astype("<i4").tobytes())
        return digest.hexdigest()

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the ids `start` to `start + n`, int32.

        Raises:
            UserError: if an id is outside the vocabulary. JAX would silently use a different one.
        """
        return self.spans([start], [n])

    def spans(self, starts: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Return copies of several spans of ids, concatenated, int32. Raises as `take`."""
        out, end = np.empty(sum(sizes), np.int32), 0
        for start, n in zip(starts, sizes, strict=True):
            begin, end = end, end + n
            part = bisect_right(self._ends, start)
            while begin < end:
                plain = self._plain[part]
                first = start - (self._ends[part] - len(plain))
                piece = plain[first : first + end - begin]
                out[begin : begin + len(piece)] = piece
                start, begin, part = start + len(piece), begin + len(piece), part + 1
        if (
            len(out) and int(out.view(np.uint32).max()) >= self.vocab_size
        ):  # one check for all: reading costs more than copying
            for start, n in zip(starts, sizes, strict=True):
                for part_ids, end in zip(self.parts, self._ends, strict=True):
                    first = end - len(part_ids)
                    _check(part_ids[max(start - first, 0) : max(start + n - first, 0)], part_ids, self.vocab_size)
        return out

    def will_read(self, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Let the kernel read the ids of mapped files that are needed next, all of them concurrently.

        Otherwise each page fault waits for the disk, with megabytes of readahead for a window of 2 KB.
        """
        with contextlib.suppress(OSError):  # it is only advice
            for start, n in zip(starts, sizes, strict=True):
                part = bisect_right(self._ends, start)
                mapping, offset = self._maps[part]
                if mapping is not None:
                    plain = self._plain[part]
                    begin = offset + (start - (self._ends[part] - len(plain))) * plain.itemsize
                    page = begin // mmap.PAGESIZE * mmap.PAGESIZE
                    mapping.madvise(mmap.MADV_WILLNEED, page, min(begin + n * plain.itemsize, len(mapping)) - page)

    @property
    def segmented(self) -> bool:
        """Whether windows have segment ids."""
        return bool(self.end_ids)

    def starts(self, block_size: int) -> int:
        """Count the ids at which a complete window can start."""
        return len(self) - block_size

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of the windows of a whole split, `stride` apart.

        An incomplete last window is dropped, unless it is the whole split.
        """
        starts = self.starts(block_size)
        return range(0, starts, stride) if starts > 0 else range(int(len(self) > 1))

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts`, int32; -1 beyond the end of the ids.

        Returns:
            `[B, T + 1]`: T inputs and, shifted by one, T targets. With `end_ids`, `[B, T, 3]`: the input, target and segment
            id of each position. The last input of a document has the target -1: it does not predict the next document.
        """
        if not self.end_ids:
            return self._rows(starts, block_size)
        out = np.empty((len(starts), block_size, 3), np.int32)
        for first in range(0, len(starts), WINDOWS_PER_BLOCK):
            block = slice(first, first + WINDOWS_PER_BLOCK)
            self._write_documents(self._rows(starts[block], block_size), out[block])
        return out

    def _rows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read rows of T + 1 ids; -1 beyond the end of the ids."""
        positions, size = starts.tolist(), block_size + 1
        sizes = [max(min(size, len(self) - start), 0) for start in positions]
        self.will_read(positions, sizes)
        ids = self.spans(positions, sizes)
        if len(ids) == len(starts) * size:
            return ids.reshape(-1, size)
        rows = np.full((len(starts), size), -1, np.int32)
        rows[np.arange(size) < np.array(sizes)[:, None]] = ids
        return rows

    def _write_documents(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Write the inputs, targets and segment ids of rows of ids to `[B, T, 3]`."""
        inputs, (B, T) = rows[:, :-1], out.shape[:2]
        ends = np.flatnonzero(is_any(inputs, self.end_ids))
        out[..., 0], out[..., 1] = inputs, rows[:, 1:]
        out.reshape(-1, 3)[ends, 1] = -1
        # Segments begin at rows and after ends. Each has its number within its row, once per position.
        begins = np.sort(np.concatenate([np.arange(0, B * T, T), ends[(ends + 1) % T > 0] + 1]))
        row_begins = np.flatnonzero(begins % T == 0)
        number = np.arange(len(begins)) - np.repeat(row_begins, np.diff(row_begins, append=len(begins)))
        out[..., 2] = np.repeat(number.astype(np.int32), np.diff(begins, append=B * T)).reshape(B, T)


def is_any(ids: np.ndarray, values: tuple[int, ...]) -> np.ndarray:
    """Return a boolean mask of the ids equal to any of `values`."""
    mask: np.ndarray = ids == values[0]
    for value in values[1:]:
        mask |= ids == value
    return mask


def split_of(path: Path) -> str:
    """Return the split of a token file, `train` or `val`, from a word of its name (a run of letters); "" if it has neither.

    `train.bin`, `fineweb_val_000000.bin` and `retrieval-train.bin` match, `constraint.bin` does not.

    Raises:
        UserError: if the name matches both splits.
    """
    words = set(re.findall(r"[^\W\d_]+", path.stem.lower()))
    splits = [split for split, names in SPLIT_WORDS.items() if words & names]
    if len(splits) > 1:
        raise UserError(f"{path} names both training and validation: rename it to train.bin or val.bin")
    return splits[0] if splits else ""


def is_token_path(path: Path) -> bool:
    """Return whether a path is a `.bin` file, or a directory with one named after a split or with only `.bin` files."""
    if not path.is_dir():
        return path.suffix == ".bin"
    files = _visible(path)
    bins = [p for p in files if p.suffix == ".bin"]
    return any(map(split_of, bins)) or 0 < len(bins) == len(files)


def open_splits(path: Path, train_fraction: float) -> tuple[Tokens, Tokens, str]:
    """Map training and validation ids from a token file, or from a directory with the split in the names of its files.

    A single file, or a directory without validation files, is split at `train_fraction`.

    Returns:
        Training ids, validation ids, and a one-line description with the number of files read and skipped.

    Raises:
        UserError: if a file is missing, empty, or has an unknown format.
    """
    if not path.exists():
        raise missing(path)
    files, skipped = {"train": [path], "val": list[Path]()}, 0
    if path.is_dir():
        visible = [p for p in _visible(path) if p.name not in NOT_COUNTED]
        files = {split: [p for p in visible if p.suffix == ".bin" and split_of(p) == split] for split in SPLIT_WORDS}
        skipped = len(visible) - sum(map(len, files.values()))
        if not files["train"]:
            raise UserError(
                f"no token file in {path} has the word 'train' in its name: rename them to train.bin and val.bin"
            )
    train, val = (Tokens([open_tokens(p) for p in files[split]]) for split in ("train", "val"))
    if not files["val"]:
        train, val = train.split(int(train_fraction * len(train)))
    n = sum(map(len, files.values()))
    others = f"; skipped {skipped} other file{'s' * (skipped > 1)}" if skipped else ""
    return train, val, f"{n} token file{'s' * (n > 1)} at {path}{others}"


def open_tokens(path: Path) -> np.ndarray:
    """Memory-map the ids of a file.

    nanoGPT's format is little-endian uint16 without a header. llm.c's has a header of 256 int32 that begins with magic,
    version and number of ids, followed by uint16 (GPT-2) or uint32 (Llama 3).
    """
    with reported(f"cannot read {path}"), path.open("rb") as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(4 * HEADER)
    if size == 0:
        raise UserError(f"{path} is empty")
    magic, version, count = np.frombuffer(head, "<i4", 3).tolist() if len(head) == 4 * HEADER else (0, 0, 0)
    if magic in LLMC:
        known, dtype = LLMC[magic]
        if version != known:
            raise UserError(f"{path}: llm.c token file of version {version} is not supported, only version {known}")
        if size != 4 * HEADER + count * dtype.itemsize:
            raise UserError(
                f"{path}: the header declares {count:,} ids, but the file has {size:,} bytes: it is damaged"
            )
        if not count:
            raise UserError(f"{path} is empty: its header declares 0 ids")
        return np.memmap(path, dtype, "r", 4 * HEADER, (count,))
    if size % 2:
        raise UserError(f"{path}: {size:,} bytes are not 16-bit ids (the size is odd), and there is no llm.c header")
    return np.memmap(path, np.dtype("<u2"), "r")


def _visible(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.is_file() and not p.name.startswith("."))


def _mapping(part: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """Return the memory map of an array and its offset in bytes; None: not mapped, or the system takes no advice."""
    mapping = getattr(part, "_mmap", None)
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return None, 0
    return mapping, part.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data


def _check(ids: np.ndarray, part: np.ndarray, vocab_size: int) -> None:
    """Check the ids of a slice of a part."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        where = f"{part.filename}: " if isinstance(part, np.memmap) else ""
        raise UserError(
            f"{where}id {wrong} is outside the vocabulary of {vocab_size}: use the tokenizer that made these ids"
        )
