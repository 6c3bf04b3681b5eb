"""Token files: memory-mapped ids in nanoGPT's and llm.c's formats, and the splits of a directory of such files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.data.id_types import check_raw_ids
from jaxgpt.data.tokens import Tokens
from jaxgpt.directories import is_prepared
from jaxgpt.errors import UserError, plural, reported

HEADER = 256  # number of int32 values in the header of an llm.c file
NUMPY = b"\x93NUMPY"  # first bytes of a .npy file
TRAINER = "training_args.bin"  # arguments of transformers' Trainer, a pickle
SPLIT_WORDS = {"val": {"val", "valid", "validation"}, "train": {"train", "training"}}
LLMC: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}  # magic number: (version, dtype of the ids)


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
    files = {"train": [path], "val": list[Path]()}
    if path.is_dir():
        files = token_files(path)
        if not files["train"]:
            raise UserError(
                f"no token file in {path} has the word 'train' in its name: rename the files to train.bin and val.bin"
            )

    train = Tokens([open_tokens(p) for p in files["train"]], vocab_size)
    val = Tokens([open_tokens(p) for p in files["val"]], vocab_size)
    has_recorded_type = path.is_dir() and is_prepared(path)  # in the index of the prepared directory
    for part in (*train.parts, *val.parts):
        _check_type(part, vocab_size, has_recorded_type)

    if not files["val"]:
        train, val = train.split(int(train_fraction * len(train)))
    count = len(files["train"]) + len(files["val"])
    return TokenSplits(train, val, f"{plural(count, 'token file')} at {path}")


def _check_type(ids: np.ndarray, vocab_size: int, has_recorded_type: bool) -> None:
    """Raise `UserError` if a file without a header, read as uint16, needs a wider type, or probably has one."""
    if not isinstance(ids, np.memmap) or ids.offset:  # an empty array, or a file with a header, which declares the type
        return
    if vocab_size > 1 << 16:
        raise UserError(
            f"{ids.filename} has no header and is read as 16-bit ids, too small for a vocabulary of {vocab_size:,}: write "
            f"32-bit ids in llm.c's format (a header of 256 int32: 20240801, 7, number of ids)"
        )
    if not has_recorded_type:
        check_raw_ids(ids)


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
                f"{count:,} ids, but the file has {size:,} bytes: write or download it again"
            )
        return np.memmap(path, dtype, "r", 4 * HEADER, (count,))

    if head.startswith(NUMPY):
        fix = f"write its ids with numpy.load('{path.name}').astype('uint16').tofile('train.bin')"
        raise UserError(f"{path} is a NumPy array (.npy), not raw ids: {fix}")
    if size % 2:
        raise UserError(
            f"{path}: {size:,} bytes are not 16-bit ids (the size is odd), and there is no llm.c header: write uint16 ids"
        )
    return np.memmap(path, np.dtype("<u2"), "r")


def token_files(directory: Path) -> dict[str, list[Path]]:
    """List the token files of a directory by split, `train` and `val`."""
    bins = sorted(p for p in directory.glob("[!.]*.bin") if p.name != TRAINER and p.is_file())
    return {split: [p for p in bins if split_of(p) == split] for split in SPLIT_WORDS}
