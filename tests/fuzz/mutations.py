"""Nearly valid inputs: files with changed bytes, and JSON with changed values and keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

# Numbers and words that often cause errors, as JSON.
HARD = """0 -0.0 -1 1 2 true null 1e400 -1e400 1e308 5e-324 NaN Infinity 1.5 01 'a' [] {} "" "\\ud800" "\\u0000" "a\\nb" "../x"
"/etc/passwd" {"a":1,"a":2} 1000000000000 2147483648 4294967296 9223372036854775808 18446744073709551616""".split()
HARD += ["1" + "0" * 400, "9" * 5000, '"' + "x" * 3000 + '"', "[" * 3000, "[" * 200 + "]" * 200]
VALUE = re.compile(r'"(?:[^"\\]|\\.)*"(?!:)|-?\d[\d.eE+-]*|true|false|null')
KEY = re.compile(r'"(?:[^"\\]|\\.)*"(?=:)')
CONTAINER = re.compile(r"[{\[][^][{}]*[]}]|[{\[]")


def changed_bytes(rng: Random, data: bytes) -> bytes:
    """Truncate, cut, insert or replace bytes, one to three times."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        start, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        more = rng.choice([rng.randbytes(rng.randrange(20)), rng.choice(HARD).encode(), data[start : start + 40]])
        changes = [data[:start], data[:start] + data[end:], data[:start] + more + data[start:]]
        changes += [data[:start] + rng.randbytes(1) + data[start + 1 :]] * 3
        changes += [rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x80\x04\x95", b"PK\x03\x04", b"\0"]) + data]
        data = rng.choice(changes)
    return data


def changed_json(rng: Random, value: Any, keys: Sequence[str] = ()) -> bytes:
    """Replace, wrap, move, rename or add values, one to three times; rarely change bytes."""
    text = json.dumps(value)
    if rng.random() < 0.2:
        return changed_bytes(rng, text.encode())
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = [*rng.choice([VALUE, VALUE, VALUE, KEY, CONTAINER]).finditer(text)]
        if not places:
            break
        place = rng.choice(places)
        other = rng.choice(places)
        old = place[0]
        key = rng.choice(keys or ("x",))
        if old == "{" and text[place.end() : place.end() + 1] == '"':
            new = f'{{"{key}": {rng.choice([*HARD, "3"])}, '
        else:
            changes = [rng.choice(HARD), json.dumps(key), other[0], f"[{old}]"]
            new = rng.choice([*changes, *[near(rng, old)] * 4])
        text = text[: place.start()] + new + text[place.end() :]
    return text.encode("utf-8", "surrogatepass")


def near(rng: Random, scalar: str) -> str:
    """Return a value of the same type."""
    if re.fullmatch(r"-?\d{1,20}", scalar):
        number = int(scalar)
        return str(rng.choice([number + rng.randint(-2, 2), number * 2, -number, 2 ** rng.randrange(70)]))
    if re.fullmatch(r"-?\d[\d.eE+-]{,20}", scalar):
        return rng.choice([f"-{scalar}", "0.3", "1.0", "2"])
    if scalar[0] == '"':
        return rng.choice([scalar[:-2] + '"', scalar[:-1] + 'x"', scalar.upper(), '""']) if len(scalar) > 2 else '"x"'
    return {"true": "false", "false": "true"}.get(scalar, scalar)
