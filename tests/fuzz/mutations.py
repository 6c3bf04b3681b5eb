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
SIGNATURES = [b"\xef\xbb\xbf", b"\xff\xfe", b"\x80\x04\x95", b"PK\x03\x04", b"\0"]  # UTF-8, UTF-16, pickle, zip, NUL
TIMES = [1, 1, 2, 3]  # numbers of changes, each with equal probability

# Parts of a JSON text: a scalar value, a key, and an object or array without inner ones, or an opening bracket.
VALUE = re.compile(r'"(?:[^"\\]|\\.)*"(?!:)|-?\d[\d.eE+-]*|true|false|null')
KEY = re.compile(r'"(?:[^"\\]|\\.)*"(?=:)')
CONTAINER = re.compile(r"[{\[][^][{}]*[]}]|[{\[]")


def changed_bytes(rng: Random, data: bytes) -> bytes:
    """Truncate, cut, insert or replace bytes, one to three times; replacing one byte is three times as probable."""
    for _ in range(rng.choice(TIMES)):
        start, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        more = rng.choice([rng.randbytes(rng.randrange(20)), rng.choice(HARD).encode(), data[start : start + 40]])
        truncated = data[:start]
        cut = data[:start] + data[end:]
        inserted = data[:start] + more + data[start:]
        replaced = data[:start] + rng.randbytes(1) + data[start + 1 :]
        marked = rng.choice(SIGNATURES) + data
        data = rng.choice([truncated, cut, inserted, *[replaced] * 3, marked])
    return data


def changed_json(rng: Random, value: Any, keys: Sequence[str] = ()) -> bytes:
    """Replace, wrap, move, rename or add values, one to three times; rarely change bytes."""
    text = json.dumps(value)
    if rng.random() < 0.2:
        return changed_bytes(rng, text.encode())
    for _ in range(rng.choice(TIMES)):
        part = rng.choice([VALUE, VALUE, VALUE, KEY, CONTAINER])
        places = list(part.finditer(text))
        if not places:
            break
        place = rng.choice(places)
        other = rng.choice(places)
        old = place[0]
        key = rng.choice(keys or ("x",))
        has_keys = old == "{" and text[place.end() : place.end() + 1] == '"'
        if has_keys:
            new = f'{{"{key}": {rng.choice([*HARD, "3"])}, '
        else:
            changes = [rng.choice(HARD), json.dumps(key), other[0], f"[{old}]"]
            new = rng.choice([*changes, *[near(rng, old)] * 4])  # a near value in half of the cases
        text = text[: place.start()] + new + text[place.end() :]
    return text.encode("utf-8", "surrogatepass")


def near(rng: Random, scalar: str) -> str:
    """Return a value of the same type."""
    if re.fullmatch(r"-?\d{1,20}", scalar):
        number = int(scalar)
        neighbor = number + rng.randint(-2, 2)
        power = 2 ** rng.randrange(70)
        return str(rng.choice([neighbor, number * 2, -number, power]))
    if re.fullmatch(r"-?\d[\d.eE+-]{,20}", scalar):
        return rng.choice([f"-{scalar}", "0.3", "1.0", "2"])
    if scalar == '""':
        return '"x"'
    if scalar[0] == '"':
        return rng.choice([scalar[:-2] + '"', scalar[:-1] + 'x"', scalar.upper(), '""'])
    return {"true": "false", "false": "true"}.get(scalar, scalar)
