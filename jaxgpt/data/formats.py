"""Formats of files with documents: detect and undo compression, and split JSON into its objects.

The content decides: a `.jsonl` file that is gzip inside is unpacked. Without a known signature, the suffix decides.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxgpt.errors import UserError

PACKED = (".gz", ".xz", ".bz2", ".zst")
LINES = (".jsonl", ".ndjson")
# Formats with structure that becomes part of the text.
STRUCTURED = {".csv": "CSV", ".tsv": "TSV", ".html": "HTML", ".htm": "HTML", ".xml": "XML"}
HEAD = 16  # bytes that identify a format
CHUNK = 1 << 16  # bytes of a JSON array to read at a time, at first
SPREAD = 1 << 26  # maximum bytes to read to find the end of an object
SPREAD_ERROR = (
    "one JSON object is spread over several lines: write one object per line (json.dumps without indent), or an array of "
    "objects in a .json file"
)
# A complete string, the quote of an incomplete string, or a bracket: the parts of JSON that decide where an object ends.
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|["\[\]{},]', re.DOTALL)


class MissingPackage(UserError):
    """The error for a format whose library is not installed."""


def check_no_arrow(path: Path) -> None:
    """Raise `UserError` for a file of `datasets.save_to_disk`: the JSON files next to it are not the text of the dataset."""
    if path.suffix.lower() == ".arrow":
        raise UserError(
            f"{path} is an Arrow file of the package datasets: write the data set as Parquet, for example with "
            f"datasets.load_from_disk('{path.parent}').to_parquet('train.parquet')"
        )


def compression(name: str, head: bytes) -> str:
    """Return the suffix of the compression of a file, such as `.gz`; "" if it is not compressed.

    Args:
        name: file name, used if the content has no known signature.
        head: the first `HEAD` bytes of the file.
    """
    if head.startswith(b"\x1f\x8b\x08"):
        return ".gz"
    if head.startswith(b"\xfd7zXZ\0"):
        return ".xz"
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return ".bz2"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return ".zst"
    suffix = Path(name.lower()).suffix
    return suffix if suffix in PACKED else ""


def unpacked(file: BinaryIO, suffix: str, where: str) -> Any:
    """Return a reader of the unpacked bytes of a file; `suffix` comes from `compression`.

    Raises:
        MissingPackage: if the library of the compression is not installed.
    """
    match suffix:
        case ".gz":
            return gzip.open(file)
        case ".xz":
            return lzma.open(file)
        case ".bz2":
            return bz2.open(file)
        case ".zst":
            return _zstd(where).open(file)
    return file


def inner_name(name: str, suffix: str) -> str:
    """Return the name of the unpacked file, in lower case: `a.jsonl` for `A.jsonl.gz`."""
    lower = name.lower()
    return lower.removesuffix(suffix) if suffix else lower


def json_layout(file: BinaryIO) -> str:
    """Return the layout of a `.json` file: `array`, `lines` (one object per line) or `object`."""
    line = file.readline().removeprefix(codecs.BOM_UTF8).strip()
    while not line:
        line = file.readline()
        if not line:
            return "lines"
        line = line.strip()
    if line.startswith(b"["):
        return "array"
    return "lines" if line.endswith(b"}") else "object"


def is_spread(line: bytes, file: BinaryIO) -> bool:
    """Return whether a line begins a JSON object that ends in a later line; the position in the file stays the same."""
    if not line.lstrip().startswith(b"{"):
        return False
    position = file.tell()
    text = (line + file.read(SPREAD)).decode("utf-8", "replace").lstrip()
    file.seek(position)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def array_items(file: BinaryIO, where: str) -> Iterator[bytes]:
    """Yield the items of a JSON array, unparsed; memory is bounded by the largest item.

    Raises:
        UserError: if the array has no end, or is followed by other text.
    """
    text = b""
    while text != b"[":  # white space and a byte-order mark
        text = file.read(1)
        if not text:
            return

    text = b""
    size = CHUNK
    begin = 0  # position of the current item
    place = 0  # position of the next token
    depth = 1
    while True:
        for found in TOKEN.finditer(text, place):
            token = found[0]
            if token == b'"':
                break  # a string without its end
            place = found.end()
            if token in (b"[", b"{"):
                depth += 1
            elif token in (b"]", b"}"):
                depth -= 1
            if (depth == 1 and token == b",") or depth == 0:
                item = text[begin : found.start()].strip()
                if item:
                    yield item
                begin = place
            if depth == 0:
                if text[place:].strip() or file.read(CHUNK).strip():
                    raise UserError(f"{where}: text after the end of the array: write one object per line (.jsonl)")
                return

        # Longer reads after an item that does not fit: every byte is scanned a few times at most.
        block = file.read(size)
        if not block:
            raise UserError(f"{where}: the array of the .json file has no end: the file is truncated or damaged")
        size = max(CHUNK, len(text) - begin)
        text = text[begin:] + block
        place -= begin
        begin = 0


def _zstd(where: str) -> Any:
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            import backports.zstd as zstd
        except ImportError:
            raise MissingPackage(f"{where} needs the package backports.zstd: pip install 'jaxgpt[data]'") from None
    return zstd
