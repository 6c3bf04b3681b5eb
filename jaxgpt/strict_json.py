"""Strict JSON: parse text to values, without the ambiguous forms that Python's parser accepts."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jaxgpt.errors import UserError, short_repr

_SURROGATES = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse JSON strictly: raise a `UserError` that begins with `where` for invalid or ambiguous text.

    Rejects duplicate keys, NaN and Infinity, numbers beyond float64, unpaired surrogates, a byte-order mark, and nesting deeper
    than Python's stack. Integers of 19 characters or more become floats.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_float
        )
        if _SURROGATES.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where}: not valid JSON (nested too deeply)") from None
    except ValueError as e:
        raise UserError(f"{where}: not valid JSON ({e})") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"duplicate key {short_repr(key)}")
        value[key] = item
    return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {short_repr(digits)} is not finite in float64")
    return value
