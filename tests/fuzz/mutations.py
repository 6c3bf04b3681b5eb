"""Nearly valid inputs: files with changed bytes or JSON values, and random structures of the same words.

Hypothesis draws only a seed; drawing each part of an input would take longer than the test.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

# Numbers and words that often cause errors, as JSON.
HARD = [
    "0",
    "-0.0",
    "-1",
    "1",
    "2",
    "true",
    "null",
    "1e400",
    "-1e400",
    "1e308",
    "5e-324",
    "NaN",
    "Infinity",
    "1.5",
    "1" + "0" * 12,
    "1" + "0" * 400,
    "9" * 5000,
    str(2**31),
    str(2**32),
    str(2**63),
    str(2**64),
    "[]",
    "{}",
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"a\\nb"',
    '"../x"',
    '"/etc/passwd"',
    '"' + "x" * 3000 + '"',
    "[" * 3000,
    "[" * 200 + "]" * 200,
    '{"a":1,"a":2}',
    "01",
    "'a'",
]

Make = Callable[[Random], bytes]


def inputs(*makes: Make) -> st.SearchStrategy[bytes]:
    """Make a strategy that combines all kinds of inputs."""
    return st.integers(0, 2**64 - 1).map(Random).map(lambda rng: rng.choice(makes)(rng))


def changed_bytes(examples: Sequence[bytes]) -> Make:
    """Return a maker of valid files with one to three mutations."""

    def make(rng: Random) -> bytes:
        data = rng.choice(examples)
        for _ in range(rng.choice([1, 1, 2, 3])):
            data = rng.choice([_flip, _cut, _insert, _prefix])(rng, data or b"\0")
        return data

    return make


def changed_json(examples: Sequence[Any], keys: Sequence[str]) -> Make:
    """Return a maker of JSON values with one to three parts replaced, removed, added, renamed or duplicated."""

    def make(rng: Random) -> bytes:
        value = copy.deepcopy(rng.choice(examples))
        for _ in range(rng.choice([1, 1, 2, 3])):
            value = _change(rng, value, keys)
        return dump(value).encode("utf-8", "surrogatepass")

    return make


def any_json(rng: Random) -> bytes:
    """Return a random JSON structure."""
    return dump(_any(rng, 3)).encode("utf-8", "surrogatepass")


def changed(examples: Sequence[Any], keys: Sequence[str]) -> tuple[Make, ...]:
    """Return makers of JSON files with mutated structure or bytes, and of random structures."""
    plain = changed_bytes([json.dumps(example).encode() for example in examples])
    nearly = changed_json(examples, keys)
    return nearly, nearly, nearly, plain, any_json


def _flip(rng: Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _cut(rng: Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] if rng.random() < 0.5 else data[:start] + data[rng.randint(start, len(data)) :]


def _insert(rng: Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    pieces = [rng.randbytes(rng.randrange(20)), rng.choice(HARD).encode(), data[at : at + 40]]
    return data[:at] + rng.choice(pieces) + data[at:]


def _prefix(rng: Random, data: bytes) -> bytes:
    return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x80\x04\x95", b"PK\x03\x04", b"\0", b" " * 100]) + data


def _change(rng: Random, value: Any, keys: Sequence[str]) -> Any:
    places = list(_places(value))
    if not places:
        return _any(rng, 3)
    inside, key = rng.choice(places)
    match rng.choice(["hard", "near", "near", "other", "same", "remove", "add", "rename"]):
        case "hard":
            inside[key] = _Raw(rng.choice(HARD))
        case "near":
            inside[key] = _near(rng, inside[key])
        case "other":
            inside[key] = _any(rng, 2)
        case "same":  # a value from elsewhere
            other, name = rng.choice(places)
            inside[key] = copy.deepcopy(other[name])
        case "remove":
            del inside[key]
        case "add" if isinstance(inside, dict):
            inside[rng.choice([*keys, "x"])] = _any(rng, 2)
        case "rename" if isinstance(inside, dict):
            inside[rng.choice(keys)] = inside.pop(key)
        case _:
            if isinstance(inside, list):
                inside.insert(key, _any(rng, 2))
    return value


def _near(rng: Random, value: Any) -> Any:
    """Return a value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice([value + rng.randint(-2, 2), value * 2, -value, 2 ** rng.randrange(70)])
        case float():
            return rng.choice([value * 2, -value, value / 3, float(round(value)), round(value)])
        case str():
            return rng.choice([value[:-1], value + "x", value.upper(), value[::-1], ""])
    return value


def _any(rng: Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 2:
        return _Raw(rng.choice(HARD))
    if kind == 2:
        return rng.choice([None, True, False])
    if kind == 3:
        return rng.randint(-(10 ** rng.randrange(20)), 10 ** rng.randrange(20))
    if kind == 4:
        return struct.unpack("<d", rng.randbytes(8))[0]
    if kind == 5:
        return "".join(chr(rng.choice([97, 10, 0, 0x2028, 0xE9, 0xD800, 0x1F600])) for _ in range(rng.randrange(5)))
    items = [_any(rng, depth - 1) for _ in range(rng.randrange(4))]
    return items if kind == 6 else {str(_any(rng, 0))[:20]: item for item in items}


class _Raw(str):
    """JSON text that is inserted verbatim."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    todo = [value]
    while todo:
        inside = todo.pop()
        keys = inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
        for key in keys:
            yield inside, key
            todo.append(inside[key])


def dump(value: Any) -> str:
    """Serialize to JSON, inserting raw text verbatim."""
    match value:
        case _Raw():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(str(k))}:{dump(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)
