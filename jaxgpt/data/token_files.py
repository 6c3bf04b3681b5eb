"""Token files: memory-mapped ids in nanoGPT's and llm.c's formats, and the splits of a directory of such files.

nanoGPT's format is little-endian uint16 without a header. llm.c's format has a header of 256 int32 (magic number, version,
number of ids, unused values), followed by uint16 ids (GPT-2) or uint32 ids (Llama 3).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.data.files.formats import NUMPY, how_to_convert_npy
from jaxgpt.data.id_types import check_raw_ids
from jaxgpt.data.tokens import Tokens, has_header
from jaxgpt.directories import is_prepared
from jaxgpt.errors import UserError, plural, reported

HEADER_BYTES = 4 * 256  # size of the header of an llm.c file
# Magic number of an llm.c file: version, and dtype of the ids.
LLMC: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
RAW = np.dtype("<u2")  # dtype of the ids in files without a header
TRAINER = "training_args.bin"  # arguments of transformers' Trainer, a pickle
TRAIN_WORDS = {"train", "training"}
VAL_WORDS = {"val", "valid", "validation"}


def split_of(path: Path) -> str:
    """Classify a token file by the words in its name: return `train`, `val` or "".

    `train.bin`, `fineweb_val_000000.bin` and `retrieval-train.bin` match; `constraint.bin` does not. A name with words of
    both splits is for validation.
    """
    words = set(re.findall(r"[^\W\d_]+", path.stem.lower()))
    if words & VAL_WORDS:
        return "val"
    if words & TRAIN_WORDS:
        return "train"
    return ""


class TokenFiles(NamedTuple):
    """The token files of a directory, sorted by name."""

    train: list[Path]
    val: list[Path]


def token_files(directory: Path) -> TokenFiles:
    """List the visible token files of a directory by split; other files are skipped."""
    files = sorted(p for p in directory.glob("[!.]*.bin") if p.name != TRAINER and p.is_file())
    train = [p for p in files if split_of(p) == "train"]
    val = [p for p in files if split_of(p) == "val"]
    return TokenFiles(train, val)


def is_token_path(path: Path) -> bool:
    """Return whether a path is a `.bin` file, or a directory with a `.bin` file named after a split."""
    return any(token_files(path)) if path.is_dir() else path.suffix == ".bin"


def has_validation_files(path: Path) -> bool:
    """Return whether a path is a directory with a `.bin` file for validation."""
    return path.is_dir() and bool(token_files(path).val)


class TokenSplits(NamedTuple):
    """The ids of token files."""

    train: Tokens
    val: Tokens
    source: str  # one-line description of the files


def open_splits(path: Path, train_fraction: float, vocab_size: int) -> TokenSplits:
    """Memory-map training and validation ids from a token file or a directory of token files.

    A single file, or a directory without validation files, is split at `train_fraction`.

    Raises:
        UserError: if there is no training file, or a file is empty, damaged, or has no header although its ids or the
            vocabulary need more than 16 bits.
    """
    files = token_files(path) if path.is_dir() else TokenFiles([path], [])
    if not files.train:
        raise UserError(
            f"no token file in {path} has the word 'train' in its name: rename the files to train.bin and val.bin"
        )

    train = Tokens([open_tokens(p) for p in files.train], vocab_size)
    val = Tokens([open_tokens(p) for p in files.val], vocab_size)
    has_recorded_type = path.is_dir() and is_prepared(path)  # in the index of the prepared directory
    for ids in (*train.parts, *val.parts):
        if isinstance(ids, np.memmap) and not has_header(ids):
            _check_raw(ids, vocab_size, has_recorded_type)

    if not files.val:
        train, val = train.split(int(train_fraction * len(train)))
    count = len(files.train) + len(files.val)
    return TokenSplits(train, val, f"{plural(count, 'token file')} at {path}")


def _check_raw(ids: np.memmap, vocab_size: int, has_recorded_type: bool) -> None:
    """Raise `UserError` if a file without a header, read as uint16, needs a wider type, or probably has a wider type."""
    if vocab_size > 1 << 16:
        raise UserError(
            f"{ids.filename} has no header and is read as 16-bit ids, too small for a vocabulary of {vocab_size:,}: write "
            "32-bit ids in llm.c's format (a header of 256 int32: 20240801, 7, number of ids)"
        )
    if not has_recorded_type:
        check_raw_ids(ids)


def open_tokens(path: Path) -> np.ndarray:
    """Memory-map the ids of a file in either format.

    Raises:
        UserError: if the file cannot be read, or is empty, damaged, a NumPy array or of odd size.
    """
    with reported(f"cannot read {path}"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER_BYTES)

    if size == 0:
        raise _empty(path)
    if head.startswith(NUMPY):
        raise UserError(f"{path} is a NumPy array (.npy), not raw ids: {how_to_convert_npy(path)}")
    magic = int.from_bytes(head[:4], "little")
    if magic in LLMC and len(head) >= 12:
        return _open_llmc(path, head, size)
    if size % RAW.itemsize:
        raise UserError(
            f"{path}: {size:,} bytes are not 16-bit ids (the size is odd), and there is no llm.c header: write uint16 ids"
        )
    return np.memmap(path, RAW, "r")


def _open_llmc(path: Path, head: bytes, size: int) -> np.ndarray:
    """Memory-map the ids of a file of `size` bytes in llm.c's format."""
    magic, version, count = np.frombuffer(head, "<i4", 3).tolist()
    known_version, dtype = LLMC[magic]
    if count == 0:
        raise _empty(path)
    if version != known_version or size != HEADER_BYTES + count * dtype.itemsize:
        raise UserError(
            f"{path} is damaged, or not of version {known_version} of llm.c's format: the header declares version {version} "
            f"and {count:,} ids, but the file has {size:,} bytes: write or download it again"
        )
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,))


def _empty(path: Path) -> UserError:
    return UserError(f"{path} is empty: choose a file with token ids")
