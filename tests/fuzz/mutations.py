"""Nearly valid inputs: files with changed bytes, and JSON with changed values."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

Make = Callable[[Random], bytes]

# Numbers and words that often cause errors, as JSON.
HARD = """0 -0.0 -1 1 2 true null 1e400 -1e400 1e308 5e-324 NaN Infinity 1.5 01 'a' [] {} "" "\\ud800" "\\u0000" "a\\nb" "../x"
"/etc/passwd" {"a":1,"a":2} 1000000000000 2147483648 4294967296 9223372036854775808 18446744073709551616""".split()
HARD += ["1" + "0" * 400, "9" * 5000, '"' + "x" * 3000 + '"', "[" * 3000, "[" * 200 + "]" * 200]


class Raw(str):
    """JSON text that is inserted verbatim."""


def changed_bytes(examples: Sequence[bytes]) -> Make:
    """Return a strategy for files with one to three mutations."""

    def make(rng: Random) -> bytes:
        data = rng.choice(examples)
        for _ in range(rng.choice([1, 1, 2, 3])):
            start, end = sorted(rng.randint(0, len(data)) for _ in range(2))
            more = [rng.randbytes(rng.randrange(20)), rng.choice(HARD).encode(), data[start : start + 40]]
            changes = [data[:start], data[:start] + data[end:], data[:start] + rng.choice(more) + data[start:]]
            changes += [data[:start] + rng.randbytes(1) + data[start + 1 :]] * 3
            changes += [rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x80\x04\x95", b"PK\x03\x04", b"\0"]) + data]
            data = rng.choice(changes)
        return data

    return make


def changed_json(examples: Sequence[Any], keys: Sequence[str]) -> Make:
    """Return a strategy for JSON with one to three values replaced, removed, added or renamed."""

    def make(rng: Random) -> bytes:
        value = copy.deepcopy(rng.choice(examples))
        for _ in range(rng.choice([1, 1, 2, 3])):
            value = _change(rng, value, keys)
        return dump(value).encode("utf-8", "surrogatepass")

    return make


def changed(examples: Sequence[Any], keys: Sequence[str]) -> tuple[Make, ...]:
    """Return strategies for JSON files with changed values or bytes."""
    values = changed_json(examples, keys)
    return values, values, values, changed_bytes([json.dumps(example).encode() for example in examples])


def _change(rng: Random, value: Any, keys: Sequence[str]) -> Any:
    if not (items := list(_items(value))):
        return Raw(rng.choice(HARD))
    inside, key = rng.choice(items)
    other, name = rng.choice(items)
    new = [Raw(rng.choice(HARD)), copy.deepcopy(other[name]), [inside[key]], {rng.choice(keys): inside[key]}]
    match rng.choice(["new", "near", "near", "remove", "add", "rename"]):
        case "new":
            inside[key] = rng.choice(new)
        case "near":
            inside[key] = _near(rng, inside[key])
        case "remove":
            del inside[key]
        case "rename" if isinstance(inside, dict):
            inside[rng.choice(keys)] = inside.pop(key)
        case _ if isinstance(inside, dict):
            inside[rng.choice([*keys, "x"])] = rng.choice(new)
        case _:
            inside.insert(key, rng.choice(new))
    return value


def _near(rng: Random, value: Any) -> Any:
    """Return a value of the same type."""
    match value:
        case Raw():
            return value
        case bool():
            return not value
        case int():
            return rng.choice([value + rng.randint(-2, 2), value * 2, -value, 2 ** rng.randrange(70)])
        case float():
            return rng.choice([value * 2, -value, value / 3, round(value)])
        case str():
            return rng.choice([value[:-1], value + "x", value.upper(), value[::-1], ""])
    return value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every list or dict, with each of its keys."""
    todo = [value]
    while todo:
        inside = todo.pop()
        for key in inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ():
            yield inside, key
            todo.append(inside[key])


def dump(value: Any) -> str:
    """Serialize to JSON, inserting raw text verbatim."""
    match value:
        case Raw():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(str(k))}:{dump(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)
