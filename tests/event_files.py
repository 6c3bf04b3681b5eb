"""An independent reader of TensorBoard event files, written for the tests."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any


def read_events(path: Path) -> list[tuple[int, float, dict[str, float]]]:
    """Return the step, wall time and scalars of each event, without the first one; check lengths, not checksums."""
    data = path.read_bytes()
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        message = data[12 : 12 + length]
        data = data[16 + length :]
        assert len(message) == length, "a truncated record"
        fields = protobuf(message)
        (time,) = struct.unpack("<d", fields[1][0])
        if 3 in fields:
            assert fields[3] == [b"brain.Event:2"]
            continue
        values = {}
        for content in protobuf(fields[5][0]).get(1, []):
            value = protobuf(content)
            (values[value[1][0].decode()],) = struct.unpack("<f", value[2][0])
        found.append((fields.get(2, [0])[0], time, values))
    return found


def protobuf(data: bytes) -> dict[int, list[Any]]:
    """Parse the fields of a message: integers for varints, bytes for the other types."""
    fields: dict[int, list[Any]] = {}
    while data:
        key, data = integer(data)
        kind = key & 7
        if kind == 0:
            value: Any
            value, data = integer(data)
        else:
            length, data = (8, data) if kind == 1 else (4, data) if kind == 5 else integer(data)
            value = data[:length]
            data = data[length:]
        fields.setdefault(key >> 3, []).append(value)
    return fields


def integer(data: bytes) -> tuple[int, bytes]:
    number = 0
    for i, byte in enumerate(data):
        number |= (byte & 127) << 7 * i
        if byte < 128:
            return number, data[i + 1 :]
    raise AssertionError("a truncated integer")
