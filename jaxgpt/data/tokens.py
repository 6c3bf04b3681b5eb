"""Token ids: training and validation splits, and memory-mapped token files."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.directories import is_prepared
from jaxgpt.errors import UserError, plural, reported

HEADER = 256  # number of int32 values in the header of an llm.c file
BLOCK = 1 << 20  # ids to read at a time
HASHED_IDS = 1 << 14  # ids per block of a fingerprint
HASHED_BLOCKS = 256  # maximum number of blocks
CHECKED = 1 << 12  # 16-bit values per block of the check for wider types
CHECKED_BLOCKS = 64  # number of blocks
NONZERO = 32  # minimum number of ids other than 0 for wider types: 16-bit ids have their pattern by chance once in 2**32 files
NUMPY = b"\x93NUMPY"  # first bytes of a .npy file
SPLIT_WORDS = {"val": {"val", "valid", "validation"}, "train": {"train", "training"}}
LLMC: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}  # magic number: (version, dtype of the ids)


class Split(Protocol):
    """The interface of the token ids of a split; `Tokens` documents the members."""

    @property
    def has_documents(self) -> bool: ...
    @property
    def indexed(self) -> bool: ...
    def __len__(self) -> int: ...
    def take(self, start: int, n: int) -> np.ndarray: ...
    def starts(self, block_size: int) -> int: ...
    def eval_starts(self, block_size: int, stride: int) -> Sequence[int] | np.ndarray: ...
    def windows(self, starts: np.ndarray, block_size: int) -> Any: ...


class Tokens:
    """A sequence of token ids, in memory or in memory-mapped files.

    Attributes:
        parts: arrays; their concatenation is the sequence.
        vocab_size: size of the vocabulary; reading an id outside it is an error.
        end_ids: ids that end a document; empty: documents are not separated.
        first_id: beginning-of-text id, which replaces the first id of each window (an input only); None: windows are
            the ids as they are.
    """

    def __init__(
        self,
        parts: Sequence[np.ndarray],
        vocab_size: int = 2**31,
        end_ids: tuple[int, ...] = (),
        first_id: int | None = None,
    ) -> None:
        self.parts = [p for p in parts if len(p)]
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self.first_id = first_id
        self._ends = list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self.parts else 0

    @property
    def has_documents(self) -> bool:
        """Whether windows have the shape `[T, 3]` (input, target, document id) instead of `[T + 1]`."""
        return bool(self.end_ids)

    @property
    def indexed(self) -> bool:
        """Whether the start of a row is its index, as for packed documents or pairs, instead of a position in the text."""
        return False

    def pieces(self, start: int, n: int) -> Iterator[np.ndarray]:
        """Yield views of the n ids from index `start`, one for each part that overlaps this range."""
        index = bisect_right(self._ends, start)
        while n > 0:
            part = self.parts[index]
            first = start - (self._ends[index] - len(part))
            piece = part[first : first + n]
            yield piece
            start += len(piece)
            n -= len(piece)
            index += 1

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Split into the ids before index `at` and the other ids."""
        before = list(self.pieces(0, at))
        after = list(self.pieces(at, len(self) - at))
        return self._with_parts(before), self._with_parts(after)

    def _with_parts(self, parts: list[np.ndarray]) -> Tokens:
        return Tokens(parts, self.vocab_size, self.end_ids, self.first_id)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the n ids from index `start`, int32.

        Raises:
            UserError: if an id is outside the vocabulary (JAX would not raise an error), or a file has been truncated.
        """
        out = np.empty(n, np.int32)
        end = 0
        for piece in self.pieces(start, n):
            if isinstance(piece, np.memmap):
                _check_size(piece)
            ids = np.asarray(piece)  # plain array, for 3x faster operations than on a memory map
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
                raise _outside_vocabulary(piece, self.vocab_size)
            out[end : end + len(ids)] = ids
            end += len(ids)
        return out

    def ends(self) -> Iterator[np.ndarray]:
        """Yield the positions of the ids that end a document, block by block."""
        for start in range(0, len(self), BLOCK):
            ids = self.take(start, min(BLOCK, len(self) - start))
            yield start + np.flatnonzero(np.isin(ids, self.end_ids))

    def fingerprint(self) -> str:
        """Compute the hexadecimal SHA-256 of the number of ids and a sample of the ids.

        The sample is all ids if there are at most 4,194,304, otherwise 256 evenly spaced blocks of 16,384 ids.
        """
        n = len(self)
        starts: Sequence[int]
        if n <= HASHED_IDS * HASHED_BLOCKS:
            starts = range(0, n, HASHED_IDS)
        else:
            starts = np.linspace(0, n - HASHED_IDS, HASHED_BLOCKS, dtype=np.int64).tolist()

        digest = hashlib.sha256(str(n).encode())
        for start in starts:
            ids = self.take(start, min(HASHED_IDS, n - start))
            digest.update(ids.astype("<i4").tobytes())
        return digest.hexdigest()

    def starts(self, block_size: int) -> int:
        """Return the number of complete windows, one per start; 0 or negative if the split is too short."""
        return len(self) - block_size

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of the evaluation windows that cover the split, `stride` apart.

        An incomplete last window is dropped, unless it is the only window.
        """
        starts = self.starts(block_size)
        return range(0, starts, stride) if starts > 0 else range(int(len(self) > 1))

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts`, int32; -1 beyond the end of the ids.

        Returns:
            `[B, T + 1]`: T inputs and, shifted by one, T targets. With `end_ids`, `[B, T, 3]`: the input, target and document
            id of each position. The last input of a document has the target -1: it does not predict the next document.
        """
        rows = np.full((len(starts), block_size + 1), -1, np.int32)
        for row, start in zip(rows, starts.tolist(), strict=True):
            n = min(block_size + 1, len(self) - start)
            row[:n] = self.take(start, n)
        if not self.end_ids:
            return self._with_first_id(rows)

        ends = np.isin(rows[:, :-1], self.end_ids)
        rows = self._with_first_id(rows)  # not before `ends`: the beginning-of-text id may also end documents
        inputs = rows[:, :-1]
        targets = np.where(ends, -1, rows[:, 1:])
        documents = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        return np.stack([inputs, targets, documents], axis=-1)

    def _with_first_id(self, rows: np.ndarray) -> np.ndarray:
        """Return rows that begin with `first_id`, if any."""
        if self.first_id is None:
            return rows
        first = np.full((len(rows), 1), self.first_id, rows.dtype)
        return np.concatenate([first, rows[:, 1:]], axis=1)


def split_of(path: Path) -> str:
    """Classify a token file by the words in its name: return `train`, `val` or "".

    `train.bin`, `fineweb_val_000000.bin` and `retrieval-train.bin` match; `constraint.bin` does not.
    """
    words = set(re.findall(r"[^\W\d_]+", path.stem.lower()))
    return next((split for split, names in SPLIT_WORDS.items() if words & names), "")


def is_token_path(path: Path) -> bool:
    """Return whether a path is a `.bin` file, or a directory with a `.bin` file named after a split."""
    return any(token_files(path).values()) if path.is_dir() else path.suffix == ".bin"


def has_validation_files(path: Path) -> bool:
    """Return whether a path is a directory with a `.bin` file for validation."""
    return path.is_dir() and bool(token_files(path)["val"])


def open_splits(path: Path, train_fraction: float, vocab_size: int) -> tuple[Tokens, Tokens, str]:
    """Memory-map training and validation ids from a token file or a directory of token files.

    A single file, or a directory without validation files, is split at `train_fraction`. The third result is a
    one-line description of the files.

    Raises:
        UserError: if a training file is missing, or a file is empty, damaged, or has no header although the vocabulary
            needs 32-bit ids.
    """
    files = {"train": [path], "val": list[Path]()}
    if path.is_dir():
        files = token_files(path)
        if not files["train"]:
            raise UserError(
                f"no token file in {path} has the word 'train' in its name: rename the files to train.bin and val.bin"
            )

    train = Tokens([open_tokens(p) for p in files["train"]], vocab_size)
    val = Tokens([open_tokens(p) for p in files["val"]], vocab_size)

    # Files without a header do not declare the type of their ids.
    is_checked = not (path.is_dir() and is_prepared(path))  # the index of a prepared directory records the type
    for part in (*train.parts, *val.parts):
        if not isinstance(part, np.memmap) or part.offset:
            continue
        if vocab_size > 1 << 16:
            raise UserError(
                f"{part.filename} has no header and is read as 16-bit ids, too small for a vocabulary of {vocab_size:,}: write "
                f"32-bit ids in llm.c's format (a header of 256 int32: 20240801, 7, number of ids)"
            )
        if is_checked:
            _check_raw(part)

    if not files["val"]:
        train, val = train.split(int(train_fraction * len(train)))
    count = sum(map(len, files.values()))
    return train, val, f"{plural(count, 'token file')} at {path}"


def open_tokens(path: Path) -> np.ndarray:
    """Memory-map the ids of a file; raise `UserError` if it is empty, damaged or of odd size.

    nanoGPT's format is little-endian uint16 without a header. llm.c's format has a header of 256 int32 (magic, version,
    number of ids, unused values), followed by uint16 ids (GPT-2) or uint32 ids (Llama 3).
    """
    with reported(f"cannot read {path}"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(4 * HEADER)

    magic, version, count = np.frombuffer(head, "<i4", 3).tolist() if len(head) >= 12 else (0, 0, 0)
    if size == 0 or (magic in LLMC and not count):
        raise UserError(f"{path} is empty: choose a file with token ids")
    if magic in LLMC:
        known, dtype = LLMC[magic]
        if version != known or size != 4 * HEADER + count * dtype.itemsize:
            raise UserError(
                f"{path} is damaged, or not of version {known} of llm.c's format: the header declares version {version} and "
                f"{count:,} ids, the file has {size:,} bytes"
            )
        return np.memmap(path, dtype, "r", 4 * HEADER, (count,))

    if head.startswith(NUMPY):
        fix = f"write its ids with numpy.load('{path.name}').astype('uint16').tofile('train.bin')"
        raise UserError(f"{path} is a NumPy array (.npy), not raw ids: {fix}")
    if size % 2:
        raise UserError(f"{path}: {size:,} bytes are not 16-bit ids (the size is odd), and there is no llm.c header")
    return np.memmap(path, np.dtype("<u2"), "r")


def _outside_vocabulary(ids: np.ndarray, vocab_size: int) -> UserError:
    """Return the error for the first id outside the vocabulary; there must be one."""
    wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
    where = ""
    also = ""
    if isinstance(ids, np.memmap):
        where = f"{ids.filename}: "
        also = "" if ids.offset else ", or write a file of another type as uint16"
    return UserError(
        f"{where}id {wrong} is outside the vocabulary of {vocab_size}: use the tokenizer that made these ids{also}"
    )


def _check_size(ids: np.memmap) -> None:
    """Raise `UserError` if a memory-mapped file has become shorter: the operating system would kill the process at the read."""
    mapped: mmap.mmap | None = getattr(ids, "_mmap", None)
    if mapped is None:
        return
    end = ids.offset - ids.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    size = mapped.size()  # current size of the file
    if size < end:
        raise UserError(
            f"{ids.filename} was truncated or overwritten while it was read: it has {size:,} of {end:,} bytes; restore it. To "
            f"change a file during a run, write a new file and rename it (mv), which keeps the data of a running process"
        )


def _check_raw(ids: np.memmap) -> None:
    """Raise `UserError` if a file without a header, read as uint16, holds ids of a wider type.

    Small ids of a wider type have a zero in all but one of their 16-bit parts. Real 16-bit ids have no such pattern. Files with
    fewer than `NONZERO` ids other than 0, or with one such id at equal distances, are not rejected.
    """
    kind = _wider_type(_checked_values(ids))
    if not kind:
        return
    raise UserError(
        f"{ids.filename} has no header, so it is read as uint16, but its content looks like {kind}: write 16-bit ids with "
        f"numpy.array(ids).astype('uint16').tofile(...), or llm.c's format: a header of 256 int32 (20240520, 1, number of "
        f"ids), then the ids as uint16"
    )


def _checked_values(ids: np.memmap) -> np.ndarray:
    """Return evenly spaced blocks of 16-bit values, each at a multiple of 8 bytes, uint16 `[blocks, n]`, n a multiple of 4."""
    if len(ids) <= CHECKED * CHECKED_BLOCKS:
        return np.array(ids[: len(ids) // 4 * 4])[None]
    starts = np.linspace(0, len(ids) - CHECKED, CHECKED_BLOCKS, dtype=np.int64) // 4 * 4
    return np.stack([ids[start : start + CHECKED] for start in starts.tolist()])


def _wider_type(values: np.ndarray) -> str:
    """Return the type of ids that 16-bit values were probably written as, such as `int64`, or "" for uint16."""
    # Positive ids below 2^16: their high parts are 0. Padding by -1 or -100: its high parts are 0xFFFF.
    for size, kind in ((4, "int64 (the default of numpy.array)"), (2, "int32 or uint32")):
        parts = values.reshape(len(values), -1, size)
        low = parts[..., 0]
        high = parts[..., 1:]
        is_padding = (high == 0xFFFF).all(axis=-1) & (low >= 0x8000)
        is_small = (high == 0).all(axis=-1)
        if (is_small | is_padding).all() and _has_ids(np.where(is_padding, 0, low)):
            return f"ids of {kind}"

    # Floating-point numbers that are integers below 2^24.
    for dtype, kind in (("<f4", "float32"), ("<f8", "float64")):
        numbers = values.view(dtype)
        is_id = np.zeros(numbers.shape, bool)
        is_finite = np.isfinite(numbers)
        is_id[is_finite] = numbers[is_finite] == np.floor(numbers[is_finite])
        is_id &= (numbers >= 0) & (numbers < 2.0**24)
        if is_id.all() and _has_ids(numbers):
            return f"numbers of {kind}"
    return ""


def _has_ids(numbers: np.ndarray) -> bool:
    """Return whether numbers `[blocks, n]` are ids of a wider type, not 16-bit ids with zeros at regular places.

    A single id between zeros, such as 5, 0, 5, 0 or 5, 0, 0, 0, may also be 16-bit ids.
    """
    row, column = np.nonzero(numbers)
    if len(row) < NONZERO:
        return False
    is_same_row = row[1:] == row[:-1]
    distances = np.unique(np.diff(column)[is_same_row])
    if len(distances) != 1:
        return len(distances) > 1
    return bool(distances[0] == 1 and len(np.unique(numbers[row, column])) > 1)


def token_files(directory: Path) -> dict[str, list[Path]]:
    """List the token files of a directory by split, `train` and `val`."""
    bins = sorted(p for p in directory.glob("[!.]*.bin") if p.is_file())
    return {split: [p for p in bins if split_of(p) == split] for split in SPLIT_WORDS}
