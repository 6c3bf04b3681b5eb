"""Token files: nanoGPT's raw ids and llm.c's two formats, recognized by their first bytes and memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.config import MAX_VOCAB, UserError

HEADER = 256  # int32 numbers in the header of an llm.c file
TOGETHER = 32  # windows of documents to process at once
FIRST = 1 << 20  # ids of each file to check when it is opened; the others are checked when they are read
ZIP, TORCH = (
    b"PK\x03\x04",
    bytes.fromhex("80028a0a6cfc9c46f920"),
)  # first bytes of PyTorch files, current and legacy
SPLIT_WORDS = {"train": {"train", "training"}, "val": {"val", "valid", "validation"}}
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
        """Count the positions at which a whole window can start."""
        ...

    def eval_starts(self, block_size: int, stride: int) -> Sequence[int] | np.ndarray:
        """Return the starts of the windows of the whole split, `stride` apart."""
        ...

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts`, int32."""
        ...


class Tokens:
    """A sequence of token ids, in memory or mapped from one or more files.

    Attributes:
        parts: the arrays whose concatenation is the sequence.
        vocab_size: all ids are smaller.
        end_ids: ids that end a document; empty: documents are not separated.
    """

    def __init__(self, parts: Sequence[np.ndarray], vocab_size: int = 2**31, end_ids: tuple[int, ...] = ()) -> None:
        self.parts = [p for p in parts if len(p)]
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self._ends = list(itertools.accumulate(map(len, self.parts)))
        self._plain = [np.asarray(p) for p in self.parts]  # a slice of a memmap costs as much as copying a window
        self._short = [p.dtype.kind == "u" and p.itemsize <= 2 for p in self.parts]  # ids are the same in int32
        self._maps = [_mapping(p) for p in self.parts]

    def below(self, vocab_size: int, tokenizer_size: int = 0) -> Tokens:
        """Require ids below `vocab_size`. The first million of each file are checked now, the others when they are read.

        Files without a header have 16-bit ids, and are refused if the tokenizer has more, unless it has `MAX_VOCAB` (unknown).

        Args:
            vocab_size: of the model.
            tokenizer_size: vocabulary size of the tokenizer; 0: that of the model, which may be padded.

        Raises:
            UserError: an id is out of range, or a file cannot have such ids.
        """
        tokenizer_size = tokenizer_size or vocab_size
        large = 1 << 16 < tokenizer_size < MAX_VOCAB
        for part in self.parts:
            if large and isinstance(part, np.memmap) and part.itemsize == 2 and not part.offset:
                raise UserError(
                    f"{part.filename} has no header and is read as 16-bit ids, too few for a vocabulary of {tokenizer_size:,}: "
                    f"write 32-bit ids in llm.c's format (a header of 256 int32: 20240801, 7, number of ids)"
                )
            _check(part, 0, min(FIRST, len(part)), vocab_size)
        return Tokens(self.parts, vocab_size, self.end_ids)

    def __len__(self) -> int:
        return self._ends[-1] if self.parts else 0

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of ids `start` to `start + n` as int32.

        Raises:
            UserError: an id is outside the vocabulary (JAX would silently use another one).
        """
        return self.spans([start], [n])

    def spans(self, starts: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Return copies of several spans of ids, one after another, as int32.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        out = np.empty(sum(sizes), np.int32)
        end = 0
        for start, n in zip(starts, sizes, strict=True):
            begin, end = end, end + n
            part = bisect_right(self._ends, start)
            while begin < end:
                plain = self._plain[part]
                first = start - (self._ends[part] - len(plain))
                piece = plain[first : first + end - begin]
                if not self._short[part]:
                    _check(self.parts[part], first, first + len(piece), self.vocab_size)
                out[begin : begin + len(piece)] = piece
                start, begin, part = start + len(piece), begin + len(piece), part + 1
        if (
            len(out) and int(out.max()) >= self.vocab_size
        ):  # at once: an array of a window takes longer to look at than to copy
            self._reject(starts, sizes)
        return out

    def _reject(self, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise an error about the first id outside the vocabulary."""
        for start, n in zip(starts, sizes, strict=True):
            for part, end in zip(self.parts, self._ends, strict=True):
                begin = end - len(part)
                _check(part, max(start - begin, 0), max(min(start + n - begin, len(part)), 0), self.vocab_size)

    def will_read(self, starts: Iterable[int], sizes: Iterable[int]) -> None:
        """Let the kernel read ids from disk that are needed next, all at once.

        Otherwise it reads them one page fault after another, each with as much after it as it reads ahead for a sequential
        file: megabytes for a window of 2 KB.
        """
        with contextlib.suppress(OSError):  # it is only advice
            for start, n in zip(starts, sizes, strict=False):
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
        """Count the ids at which a whole window can start."""
        return len(self) - block_size

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows that begin at `starts`, int32; -1 beyond the end of the ids.

        Returns:
            `[B, T + 1]`, T inputs and, one further, T targets; or with `end_ids`, `[B, T, 3]`: the input, target and segment
            id of each position. The last input of a document has the target -1: it does not predict the next document.
        """
        if self.end_ids:
            out = np.empty((len(starts), block_size, 3), np.int32)
            for first in range(0, len(starts), TOGETHER):  # so few stay in the processor's cache
                some = slice(first, first + TOGETHER)
                self._documents(self._rows(starts[some], block_size), out[some])
            return out
        return self._rows(starts, block_size)

    def _rows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read rows of T + 1 ids; -1 beyond the end of the ids."""
        places, size = starts.tolist(), block_size + 1
        sizes = [max(min(size, len(self) - start), 0) for start in places]
        self.will_read(places, sizes)
        ids = self.spans(places, sizes)
        if len(ids) == len(starts) * size:
            return ids.reshape(-1, size)
        rows = np.full((len(starts), size), -1, np.int32)
        rows[np.arange(size) < np.array(sizes)[:, None]] = ids
        return rows

    def _documents(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Write the inputs, targets and segment ids of rows of ids to `[B, T, 3]`."""
        inputs, (B, T) = rows[:, :-1], out.shape[:2]
        ends = np.flatnonzero(is_any(inputs, self.end_ids))
        out[..., 0], out[..., 1] = inputs, rows[:, 1:]
        out.reshape(-1, 3)[ends, 1] = -1
        # Segments begin at rows and after ends. Each has its number within its row, once per position.
        begins = np.sort(np.concatenate([np.arange(0, B * T, T), ends[(ends + 1) % T > 0] + 1]))
        rows_begin = np.flatnonzero(begins % T == 0)
        number = np.arange(len(begins)) - np.repeat(rows_begin, np.diff(rows_begin, append=len(begins)))
        out[..., 2] = np.repeat(number.astype(np.int32), np.diff(begins, append=B * T)).reshape(B, T)

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of the windows of a whole split, `stride` apart.

        A rest that is shorter than a window is left out, unless it is the whole split.
        """
        starts = self.starts(block_size)
        return range(0, starts, stride) if starts > 0 else range(int(len(self) > 1))

    def contains(self, values: tuple[int, ...]) -> bool:
        """Return whether any id equals one of a few values."""
        return any(
            is_any(part[start : start + FIRST], values).any()
            for part in self.parts
            for start in range(0, len(part), FIRST)
        )

    def fingerprint(self) -> str:
        """Hash the ids: SHA-256, in hexadecimal, of their number and of at most 256 blocks of 16,384 ids.

        The blocks are evenly spaced and include both ends; up to 4 million ids, every id is hashed. Only these blocks are
        read, so a corpus of any size takes a fraction of a second.
        """
        n, block, blocks = len(self), 1 << 14, 256
        spread = np.linspace(0, max(n - block, 0), blocks, dtype=np.int64)
        starts = range(0, n, block) if n <= block * blocks else spread
        digest = hashlib.sha256(str(n).encode())
        for start in starts:
            digest.update(self.take(int(start), min(block, n - int(start))).astype("<i4").tobytes())
        return digest.hexdigest()

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Split into the ids before index `at` and the rest."""
        before, after, begin = [], [], 0
        for part in self.parts:
            cut = min(max(at - begin, 0), len(part))
            before.append(part[:cut])
            after.append(part[cut:])
            begin += len(part)
        return Tokens(before, self.vocab_size, self.end_ids), Tokens(after, self.vocab_size, self.end_ids)


def is_any(ids: np.ndarray, values: tuple[int, ...]) -> np.ndarray:
    """Return which ids are among a few values, bool."""
    found: np.ndarray = ids == values[0]
    for value in values[1:]:
        found |= ids == value
    return found


def split_of(path: Path) -> str:
    """Return the split of a token file from its name: `train`, `val`, or "" for neither.

    One word of the name (a run of letters) must be `train` or `training`, or `val`, `valid` or `validation`, in any case:
    `train.bin`, `fineweb_val_000000.bin` and `retrieval-train.bin` match, `constraint.bin` does not.

    Raises:
        UserError: the name matches both splits.
    """
    words = set(re.findall(r"[^\W\d_]+", path.stem.lower()))
    splits = [split for split, names in SPLIT_WORDS.items() if words & names]
    if len(splits) > 1:
        raise UserError(f"{path} names both training and validation: rename it to train.bin or val.bin")
    return splits[0] if splits else ""


def is_token_path(path: Path) -> bool:
    """Return whether a path is a `.bin` file, or a folder with one named after a split or with only `.bin` files."""
    if not path.is_dir():
        return path.suffix == ".bin"
    files = _visible(path)
    return any(p.suffix == ".bin" and split_of(p) for p in files) or (
        bool(files) and all(p.suffix == ".bin" for p in files)
    )


def open_splits(path: Path, train_fraction: float) -> tuple[Tokens, Tokens, str]:
    """Map training and validation ids from token files.

    In a folder, the names of the files give their split (`split_of`). A single file, or a folder without validation files,
    is split at `train_fraction`.

    Returns:
        Training ids, validation ids, and a one-line description with the number of files read and skipped.

    Raises:
        UserError: a file is missing, empty, or of an unknown format.
    """
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        files, skipped = {"train": [path], "val": []}, 0
    else:
        visible = _visible(path)
        bins = [p for p in visible if p.suffix == ".bin"]
        files = {split: [p for p in bins if split_of(p) == split] for split in SPLIT_WORDS}
        beside = {"index.json", "tokenizer.json"}  # what jaxgpt data prepare writes beside the shards
        others = [p for p in visible if p.name not in beside]
        skipped = len(others) - sum(map(len, files.values()))
        if not files["train"]:
            raise UserError(
                f"no token file in {path} has the word 'train' in its name: rename them to train.bin and val.bin"
            )
    train = Tokens([open_tokens(p) for p in files["train"]])
    if files["val"]:
        val = Tokens([open_tokens(p) for p in files["val"]])
    else:
        train, val = train.split(int(train_fraction * len(train)))
    read = len(files["train"]) + len(files["val"])
    rest = f"; skipped {skipped} other file{'s' * (skipped > 1)}" if skipped else ""
    return train, val, f"{read} token file{'s' * (read > 1)} at {path}{rest}"


def _visible(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def open_tokens(path: Path) -> np.ndarray:
    """Memory-map the ids of a file.

    nanoGPT's format is little-endian uint16 without a header. llm.c's has a header of 256 int32 that begins with magic,
    version and number of ids, followed by uint16 (GPT-2) or uint32 (Llama 3).
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
        raise UserError(
            f"{path} is a PyTorch file or an archive, not a token file: write the ids as raw 16-bit integers"
        )
    if len(head) == 4 * HEADER:
        magic, version, count = (int(n) for n in np.frombuffer(head, "<i4", 3))
        if magic in LLMC:
            known, dtype = LLMC[magic]
            if version != known:
                raise UserError(f"{path}: llm.c token file of version {version} is not supported, only version {known}")
            if size != 4 * HEADER + count * dtype.itemsize:
                raise UserError(
                    f"{path}: the header declares {count:,} ids, but the file has {size:,} bytes: it is truncated or damaged"
                )
            if not count:
                raise UserError(f"{path} is empty: its header declares 0 ids")
            return np.memmap(path, dtype, "r", 4 * HEADER, (count,))
    if size % 2:
        raise UserError(f"{path}: {size:,} bytes are not 16-bit ids (the size is odd), and there is no llm.c header")
    return np.memmap(path, np.dtype("<u2"), "r")


def _mapping(part: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """Return the memory map of an array, and the offset of the array in it in bytes; None if it has none, or no advice."""
    mapping = getattr(part, "_mmap", None)
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return None, 0
    return mapping, part.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data


def _check(part: np.ndarray, begin: int, end: int, vocab_size: int) -> None:
    """Check the ids from `begin` to `end` of a part."""
    ids = part[begin:end]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        where = f"{part.filename}: " if isinstance(part, np.memmap) else ""
        raise UserError(
            f"{where}id {wrong} is outside the vocabulary of {vocab_size}: use the tokenizer that made these ids"
        )
