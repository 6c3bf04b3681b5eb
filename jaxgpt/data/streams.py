"""Compressed files of one or several streams, as `xz`, `bzip2`, `zstd` and their parallel versions write them.

Python's own readers end silently at the first bytes that do not begin a stream, and lose all data after padding or damage.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

INPUT = 1 << 16  # compressed bytes to read at a time
TRUNCATED = "Compressed file ended before the end-of-stream marker was reached"  # as in the readers of Python


def open_streams(file: BinaryIO, decompressor: Callable[[], Any]) -> io.BufferedReader:
    """Return a reader of the unpacked bytes of a file.

    Args:
        file: the compressed bytes, in streams. Zeros may follow a stream (padding of xz and tar).
        decompressor: makes the decompressor of a stream, such as `lzma.LZMADecompressor`.
    """
    return io.BufferedReader(_Streams(file, decompressor), INPUT)


class _Streams(io.RawIOBase):
    """The unpacked bytes of all streams; reading raises the decompressor's error, or EOFError for a truncated stream."""

    def __init__(self, file: BinaryIO, decompressor: Callable[[], Any]) -> None:
        self._file = file
        self._make = decompressor
        self._start = file.tell()
        self._rewind()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def readinto(self, target: Any) -> int:
        """Read up to `len(target)` bytes; 0: the end."""
        view = memoryview(target).cast("B")
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position: forward by reading, backward by reading from the beginning."""
        if whence == io.SEEK_CUR:
            offset += self._place
        elif whence != io.SEEK_SET:
            raise io.UnsupportedOperation("the size of compressed data is unknown")
        if offset < self._place:
            self._file.seek(self._start)
            self._rewind()
        while self._place < offset and self._read(min(offset - self._place, INPUT)):
            pass
        return self._place

    def _rewind(self) -> None:
        self._stream: Any = None  # decompressor of the current stream; None: between streams
        self._has_read_stream = False
        self._input = b""  # compressed bytes that no decompressor has received
        self._place = 0

    def _read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; b"": the end."""
        data = b""
        while not data and size and self._begin_stream():
            data = self._decompressed(size)
        self._place += len(data)
        return data

    def _begin_stream(self) -> bool:
        """Begin the next stream if no stream is open; return whether a stream is open."""
        while self._stream is None:
            if self._has_read_stream:
                self._input = self._input.lstrip(b"\0")
            if self._input:
                self._stream = self._make()
                return True
            self._input = self._file.read(INPUT)
            if not self._input and not self._has_read_stream:
                raise EOFError(TRUNCATED)
            if not self._input:
                return False
        return True

    def _decompressed(self, size: int) -> bytes:
        """Return the next bytes of the current stream, at most `size`; b"" if it needs more input, or ends."""
        if self._stream.needs_input and not self._input:
            self._input = self._file.read(INPUT)
            if not self._input:
                raise EOFError(TRUNCATED)
        data: bytes = self._stream.decompress(self._input, size)
        self._input = b""
        if self._stream.eof:
            self._input = self._stream.unused_data
            self._stream = None
            self._has_read_stream = True
        return data
