"""Compressed files of one or several streams, as `xz`, `bzip2`, `zstd` and their parallel versions write them.

Python's own readers end silently at the first bytes that do not begin a stream, and lose all data after padding or damage.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 16  # bytes to read at a time, and maximum bytes to unpack at a time
TRUNCATED = "Compressed file ended before the end-of-stream marker was reached"  # as in the readers of Python


class Decompressor(Protocol):
    """The interface of the decompressors of one stream in `lzma`, `bz2` and `zstd`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def open_streams(file: BinaryIO, new_decompressor: Callable[[], Decompressor]) -> io.BufferedReader:
    """Return a reader of the unpacked bytes of a file.

    Reading raises the decompressor's error for damaged data, or EOFError for a truncated stream or an empty file.

    Args:
        file: the compressed bytes, in streams. Zeros may follow a stream (padding of xz and tar).
        new_decompressor: makes the decompressor of a stream, such as `lzma.LZMADecompressor`.
    """
    return io.BufferedReader(_StreamReader(file, new_decompressor), BLOCK)


class _StreamReader(io.RawIOBase):
    """The file interface of `_unpacked_blocks`."""

    def __init__(self, file: BinaryIO, new_decompressor: Callable[[], Decompressor]) -> None:
        self._file = file
        self._new_decompressor = new_decompressor
        self._start = file.tell()
        self._blocks = _unpacked_blocks(file, new_decompressor)
        self._unread = b""  # end of the last block
        self._position = 0  # number of bytes read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, target: WriteableBuffer) -> int:
        """Read up to `len(target)` bytes; 0: the end."""
        view = memoryview(target).cast("B")
        data = self._read_some(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position: forward by reading, backward by reading from the beginning."""
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence != io.SEEK_SET:
            raise io.UnsupportedOperation("the size of compressed data is unknown")

        if offset < self._position:
            self._file.seek(self._start)
            self._blocks = _unpacked_blocks(self._file, self._new_decompressor)
            self._unread = b""
            self._position = 0
        while self._position < offset:
            if not self._read_some(offset - self._position):
                break  # the end of the file
        return self._position

    def _read_some(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; b"" only at the end or for size 0."""
        if size and not self._unread:
            self._unread = next(self._blocks, b"")
        data = self._unread[:size]
        self._unread = self._unread[size:]
        self._position += len(data)
        return data


def _unpacked_blocks(file: BinaryIO, new_decompressor: Callable[[], Decompressor]) -> Iterator[bytes]:
    """Yield the unpacked bytes of all streams in blocks of 1 to `BLOCK` bytes."""
    packed = _read_packed(file)
    while packed:
        decompressor = new_decompressor()
        while not decompressor.eof:
            if decompressor.needs_input and not packed:
                packed = _read_packed(file)
            block = decompressor.decompress(packed, BLOCK)
            packed = b""
            if block:
                yield block
        packed = _skip_padding(decompressor.unused_data, file)


def _read_packed(file: BinaryIO) -> bytes:
    """Read the next compressed bytes of a stream; raise EOFError at the end of the file."""
    packed = file.read(BLOCK)
    if not packed:
        raise EOFError(TRUNCATED)
    return packed


def _skip_padding(packed: bytes, file: BinaryIO) -> bytes:
    """Return compressed bytes that begin at the next stream, given the bytes after a stream; b"": there is no next stream."""
    packed = packed.lstrip(b"\0")
    while not packed:
        block = file.read(BLOCK)
        if not block:
            return b""
        packed = block.lstrip(b"\0")
    return packed
