"""Read fields of protobuf messages, without the classes of their schema.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

# Kinds of protobuf values, and the bytes of the kinds with a fixed size.
VARINT = 0
LENGTH = 2  # strings, bytes and messages, after their length
SIZES = {1: 8, 5: 4}


def nested_values(message: memoryview, *fields: int) -> Iterator[memoryview]:
    """Yield the values of the last of these nested fields: each value of a field is a message with the next field."""
    if not fields:
        yield message
        return
    first, *others = fields
    for value in field_values(message, first):
        yield from nested_values(value, *others)


def field_values(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Yield the values of a field of a message, which must be strings, bytes or messages."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number = key >> 3
        kind = key & 7
        if kind == VARINT:
            _, at = _varint(message, at)
        elif kind == LENGTH:
            size, at = _varint(message, at)
            if number == wanted:
                yield message[at : at + size]
            at += size
        else:
            at += SIZES[kind]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decode an integer in groups of 7 bits, the lowest first; return it and the index after it."""
    number = 0
    shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
