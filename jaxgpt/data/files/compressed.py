"""Compressed files: detect the compression, and read the unpacked bytes.

The content determines the compression: a gzip file with the suffix `.jsonl` is unpacked. Without a known signature, the suffix
determines the compression.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxgpt.data.files.formats import MissingPackage
from jaxgpt.data.files.streams import open_streams
from jaxgpt.record_files import PACKED

HEAD = 16  # bytes that identify a compression


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


def unpacked(file: BinaryIO, suffix: str, where: str) -> BinaryIO:
    """Return a reader of the unpacked bytes of a file; `suffix` comes from `compression`.

    Raises:
        MissingPackage: if the library of the compression is not installed.
    """
    match suffix:
        case ".gz":
            return cast(BinaryIO, gzip.open(file))
        case ".xz":
            return open_streams(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))
        case ".bz2":
            return open_streams(file, bz2.BZ2Decompressor)
        case ".zst":
            return open_streams(file, _zstd(where).ZstdDecompressor)
    return file


def inner_name(name: str, suffix: str) -> str:
    """Return the name of the unpacked file, in lower case: `a.jsonl` for `A.jsonl.gz`."""
    lower = name.lower()
    return lower.removesuffix(suffix) if suffix else lower


def _zstd(where: str) -> Any:
    """Import the Zstandard module of Python or its backport; raise `MissingPackage` if neither is installed."""
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            import backports.zstd as zstd
        except ImportError:
            raise MissingPackage(f"{where} needs the package backports.zstd: pip install 'jaxgpt[data]'") from None
    return zstd
