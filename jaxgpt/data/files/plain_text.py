"""Read a file of plain UTF-8 text into memory, and reject other files with advice on their use."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from jaxgpt.data.files.compressed import HEAD, compression
from jaxgpt.data.files.formats import LINES, NUMPY, check_no_arrow, how_to_convert_npy
from jaxgpt.errors import UserError, reported
from jaxgpt.files import check_kind
from jaxgpt.record_files import PACKED

TEXT_BYTES = 2 * 10**8  # maximum size in bytes of a text, which is read into memory
DOCUMENTS = (*LINES, ".parquet", *PACKED)  # suffixes of files for `jaxgpt data prepare`


class NotText(UserError):
    """The error for a file that is not plain UTF-8 text."""


def read_text_file(path: Path) -> bytes:
    """Read a UTF-8 file, without its byte-order mark.

    Raises:
        NotText: if the file is not plain text.
        UserError: if the file cannot be read, is an Arrow file, or is larger than `TEXT_BYTES`.
    """
    check_no_arrow(path)
    if path.suffix.lower() in DOCUMENTS:
        raise _not_plain(path)
    check_kind(path)
    with reported(f"cannot read {path}"), path.open("rb") as file:
        data = file.read(TEXT_BYTES + 1)
    _check_text(data, path)
    if len(data) > TEXT_BYTES:
        raise _too_large(path)
    return data.removeprefix(codecs.BOM_UTF8)


def read_text_files(directory: Path, files: Sequence[Path]) -> dict[str, bytes]:
    """Read the non-empty text files of a directory, keyed by relative path; skip files that are not plain text.

    Raises:
        UserError: if the texts are too large in total, a file cannot be read, or a file is an Arrow file.
    """
    parts = dict[str, bytes]()
    size = 0
    for file in files:
        try:
            data = read_text_file(file)
        except NotText:
            continue
        size += len(data)
        if size > TEXT_BYTES:
            raise _too_large(directory)
        if data:
            parts[str(file.relative_to(directory))] = data
    return parts


def _check_text(data: bytes, path: Path) -> None:
    """Raise `NotText` if the first bytes of a file (at most `TEXT_BYTES` + 1) are not plain text."""
    if compression("", data[:HEAD]):
        raise _not_plain(path)
    if data.startswith(NUMPY):
        raise NotText(f"{path} is a NumPy array, not text: {how_to_convert_npy(path)}")

    # The last character of a truncated file may be incomplete.
    is_complete = len(data) <= TEXT_BYTES
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=is_complete)
    except UnicodeDecodeError as e:
        raise NotText(
            f"{path} is not UTF-8 text (byte {e.start}): convert it to plain text, or rename a file of token ids to .bin"
        ) from None
    if 0 in data:
        raise NotText(f"{path} is not text (it has a NUL): use plain UTF-8 text, or token ids in .bin files")


def _not_plain(path: Path) -> NotText:
    """Return the error for a file of documents or compressed data."""
    return NotText(f"{path} holds documents or compressed data, not plain text: {_how_to_prepare(path)}")


def _too_large(path: Path) -> UserError:
    """Return the error for a file or directory with too much text to read into memory."""
    return UserError(f"{path} has more than {TEXT_BYTES:,} bytes of text: {_how_to_prepare(path)}")


def _how_to_prepare(path: Path) -> str:
    """Return the advice to tokenize a file or directory before training."""
    return f"tokenize it with jaxgpt data prepare {quote(str(path))} --out tokens, then use --data.path tokens"
