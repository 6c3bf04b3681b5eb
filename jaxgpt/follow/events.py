"""Write TensorBoard event files with the standard library.

A file is a sequence of records: length (uint64), masked CRC-32C of the length, message, masked CRC-32C of the message. A
message is a protobuf `Event`: 1 wall_time (double), 2 step (varint), 3 file_version (string), 5 summary. A summary has a
field 1 for each value: 1 tag (string), 2 simple_value (float). Integers are little-endian.

Source: the format of TFRecord files, and event.proto and summary.proto of TensorBoard.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

VERSION = b"brain.Event:2"
# Keys of the protobuf fields: the number of the field times 8, plus the type (0 varint, 1 double, 2 bytes, 5 float).
WALL_TIME = b"\x09"
STEP = b"\x10"
FILE_VERSION = b"\x1a"
SUMMARY = b"\x2a"
VALUE = b"\x0a"
TAG = b"\x0a"
SIMPLE_VALUE = b"\x15"


def _crc_table() -> list[int]:
    """Return the table of CRC-32C: the remainder of each byte (polynomial of Castagnoli, reversed: 0x82F63B78)."""
    table = []
    for value in range(256):
        for _ in range(8):
            lowest = value & 1
            value >>= 1
            if lowest:
                value ^= 0x82F63B78
        table.append(value)
    return table


TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Compute the CRC-32C of bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    """Compute the CRC-32C of bytes, rotated right by 15 bits, plus a constant, as TFRecord files store it."""
    crc = crc32c(data)
    rotated = (crc >> 15) | (crc << 17)
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    """Encode a non-negative integer in groups of 7 bits, lowest first; a set highest bit means that more bytes follow."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def event(step: int, values: Mapping[str, float], wall_time: float) -> bytes:
    """Encode the `Event` of a step, with a scalar for each value; `wall_time` in seconds since 1970."""
    summary = b""
    for tag, value in values.items():
        name = tag.encode()
        content = TAG + varint(len(name)) + name + SIMPLE_VALUE + _float(value)
        summary += VALUE + varint(len(content)) + content
    return _time(wall_time) + STEP + varint(step) + SUMMARY + varint(len(summary)) + summary


def first_event(wall_time: float) -> bytes:
    """Encode the first `Event` of a file, with the version of the format."""
    return _time(wall_time) + FILE_VERSION + varint(len(VERSION)) + VERSION


def record(message: bytes) -> bytes:
    """Return the record of a message."""
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", masked_crc(length)) + message + struct.pack("<I", masked_crc(message))


def _time(seconds: float) -> bytes:
    return WALL_TIME + struct.pack("<d", seconds)


def _float(value: float) -> bytes:
    """Encode a float32. Numbers beyond its range become infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


class EventFile:
    """Writer of an event file; call `flush` after the records that belong together.

    Args:
        path: the file; its name must contain `tfevents`.
        size: bytes of an existing file to keep: records after them are dropped. 0: a new file.
        wall_time: time of a new file, in seconds since 1970.
    """

    def __init__(self, path: Path, size: int = 0, wall_time: float = 0.0) -> None:
        self.path = path
        self._file = path.open("r+b" if size else "wb")
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)
        if not size:
            self._file.write(record(first_event(wall_time)))

    def add(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """Write the scalars of a step."""
        self._file.write(record(event(step, values, wall_time)))

    def flush(self) -> int:
        """Pass all records to the operating system, and return the size of the file in bytes."""
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
