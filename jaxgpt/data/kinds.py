"""Recognize files that are not text by their name and first bytes, and suggest how to convert them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import NamedTuple

HEAD = 512  # bytes to read from a file; the last signature is tar's, at byte 257
JSON_LINES = (".jsonl", ".ndjson")
DOCUMENTS = (".docx", ".odt", ".epub")  # ZIP archives, but unpacking them does not give text

# name: (suffixes, first bytes); suffixes are checked first
FORMATS: dict[str, tuple[tuple[str, ...], tuple[bytes, ...]]] = {
    "JSON Lines": (JSON_LINES, ()),
    "Parquet": ((".parquet",), (b"PAR1",)),
    "Arrow": ((".arrow", ".feather"), (b"ARROW1",)),
    "NumPy": ((".npy",), (b"\x93NUMPY",)),
    "PDF": ((".pdf",), (b"%PDF-",)),
    "document": (DOCUMENTS, ()),
    "tar archive": ((".tar", ".tgz", ".tbz2", ".txz"), ()),
    "ZIP archive": ((".zip",), (b"PK\x03\x04", b"PK\x05\x06")),
    "7z archive": ((".7z",), (b"7z\xbc\xaf\x27\x1c",)),
    "gzip": ((".gz",), (b"\x1f\x8b",)),
    "Zstandard": ((".zst", ".zstd"), (b"\x28\xb5\x2f\xfd",)),
    "xz": ((".xz",), (b"\xfd7zXZ\0",)),
    "bzip2": ((".bz2",), ()),
    "UTF-16": ((), (b"\xff\xfe", b"\xfe\xff")),
}
DECOMPRESS = {"gzip": "gzip -dc", "Zstandard": "zstd -dc", "xz": "xz -dc", "bzip2": "bzip2 -dc"}


class Kind(NamedTuple):
    """The format of a file that is not text.

    Attributes:
        name: name of the format.
        convert: how to convert it to text or token files.
    """

    name: str
    convert: str


def kind_of(path: Path, head: bytes) -> Kind | None:
    """Recognize a file that is not text.

    Args:
        path: path of the file.
        head: its first `HEAD` bytes.

    Returns:
        The format, or None if the file may be text.
    """
    for name in _names(path.name.lower(), head):
        return Kind(name, _convert(name, path))
    return Kind("binary", "use UTF-8 text, or token ids in .bin files") if b"\0" in head else None


def _names(file: str, head: bytes) -> Iterator[str]:
    packed = re.search(r"\.tar\.(gz|zst|xz|bz2)$", file) or (head[257:262] == b"ustar" and b"\0" in head)
    yield from ["tar archive"] if packed else []
    yield from (name for name, (suffixes, _) in FORMATS.items() if file.endswith(suffixes))
    yield from (name for name, (_, marks) in FORMATS.items() if head.startswith(marks))
    yield from ["bzip2"] if re.match(rb"BZh[1-9]1AY&SY", head) else []


def _convert(name: str, path: Path) -> str:
    """Return how to convert a file to text or token files."""
    file, stem = quote(str(path)), path.with_suffix("")
    out = quote(str(path.with_suffix(".txt")))
    match name:
        case "JSON Lines" | "Parquet":
            return _prepare(path)
        case "NumPy":
            write = f"import numpy; numpy.load({str(path)!r}).astype('<u2').tofile({str(path.with_suffix('.bin'))!r})"
            return f"write its ids as 16-bit integers: python -c {quote(write)}"
        case "PDF":
            return f"extract the text: pdftotext {file} {out}"
        case "document":
            return f"extract the text: pandoc -t plain -o {out} {file}"
        case "ZIP archive":
            return f"unpack it: unzip {file} -d {quote(str(stem))}, then --data.path {quote(str(stem))}"
        case "tar archive":
            return f"unpack it: mkdir texts && tar -xf {file} -C texts, then --data.path texts"
        case "UTF-16":
            return f"convert it: iconv -f UTF-16 -t UTF-8 {file} > {quote(str(path.with_suffix('.utf8.txt')))}"
        case "gzip" | "Zstandard" | "xz" | "bzip2":
            if stem.name.lower().endswith(JSON_LINES):
                return _prepare(path)
            to = quote(str(stem if path.suffix else path) + ("" if stem.suffix else ".txt"))
            return f"unpack it: {DECOMPRESS[name]} {file} > {to}"
    return "convert it to UTF-8 text, or to token ids in .bin files"


def _prepare(path: Path) -> str:
    return f"tokenize it: jaxgpt data prepare {quote(str(path))} --out tokens, then --data.path tokens"
