"""config.json: the settings of a run as JSON, written and read with all checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, get_origin, get_type_hints

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.strict_json import parse_json

# A config.json of jaxgpt 0.1.0 has all of these sections, and no `data.bos`.
SECTIONS_OF_0_1_0 = frozenset({"model", "data", "optim", "train", "mesh"})
RECORDS_OF_0_1_0 = (".jsonl", ".ndjson")  # suffixes of conversations and pairs in 0.1.0; other files were text


def to_json(config: Any) -> str:
    """Convert a config to indented JSON, with keys in field order."""
    return json.dumps(asdict(config), indent=2, allow_nan=False) + "\n"


def from_json(text: bytes | str, where: str = "config.json") -> Config:
    """Parse a `Config`. Missing keys take their defaults; unknown keys are errors.

    Raises:
        UserError: if the text is not a JSON object, or has an unknown key, an invalid value or settings that conflict.
    """
    values = parse_json(text, where)
    try:
        config: Config = _build(Config, _with_bos(values))
    except UserError as e:
        raise UserError(f"{where}: {e}") from None
    return config


def _with_bos(values: Any) -> Any:
    """Add `data.bos` to the settings of a run of jaxgpt 0.1.0, which trained on texts without a beginning-of-text token.

    Preference pairs had the token, and imported runs have no data, so `auto` is right for both. A file that lacks a section of
    0.1.0 was not written by 0.1.0 and is unchanged.
    """
    if not isinstance(values, Mapping) or not values.keys() >= SECTIONS_OF_0_1_0:
        return values
    data = values["data"]
    if not isinstance(data, Mapping) or "bos" in data:
        return values
    path = str(data.get("path", ""))
    has_text = bool(path or data.get("mix") or data.get("dataset") != "none")
    is_text = has_text and not path.lower().endswith(RECORDS_OF_0_1_0)
    return {**values, "data": {**data, "bos": "no" if is_text else "auto"}}


def _build(cls: Any, values: Any) -> Any:
    """Build a section from JSON: nested objects become sections, lists become tuples.

    Unknown keys are passed on: the section raises an error that suggests a name.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{cls.prefix}: expected an object, found {type(values).__name__}")
    given = dict(values)
    hints = get_type_hints(cls)
    for name, value in values.items():
        kind = hints.get(name)
        if is_dataclass(kind):
            given[name] = _build(kind, value)
        elif get_origin(kind) is tuple and isinstance(value, list):
            given[name] = tuple(value)
    return cls(**given)
