"""The special tokens that tokenizer_config.json and special_tokens_map.json declare, by name or in a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.special import EXTRA, EXTRA_BEFORE_5, TOKENS
from jaxgpt.errors import UserError, short_repr


class Declared(NamedTuple):
    """The special tokens that a file declares; None: declared as null."""

    by_name: dict[str, str | None]
    fixed: dict[str, str | None]  # the part of `by_name` that no other file replaces
    unnamed: list[str] | None  # tokens without a name; None: the file has no such list

    def entries(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json, in the spelling that transformers 4 and 5 read."""
        entries: dict[str, Any] = {name: token for name, token in self.by_name.items() if name in TOKENS}
        others = {name: token for name, token in self.by_name.items() if name not in TOKENS}
        if others:
            entries[EXTRA] = others
        if self.unnamed:
            entries[EXTRA_BEFORE_5] = self.unnamed
        return entries


def declared_in(values: Mapping[str, Any], path: Path) -> Declared:
    """Find the tokens in the content of tokenizer_config.json or special_tokens_map.json."""
    standard = dict[str, str | None]()
    for name in TOKENS:
        if name in values:
            value = values[name]
            standard[name] = None if value is None else token_text(value, f"{path}: {name}")

    # Further names. transformers fixes tokens stored as strings or in a group before it reads special_tokens_map.json.
    # Therefore, that file can replace only tokens stored as objects.
    further = dict[str, str | None]()
    fixed = dict[str, str | None]()
    for name, value in values.items():
        if not name.endswith("_token") or name in TOKENS:
            continue
        if isinstance(value, str):
            fixed[name] = value
        elif isinstance(value, dict) and isinstance(value.get("content"), str):
            further[name] = value["content"]
    for group in (values.get("model_specific_special_tokens"), values.get(EXTRA)):
        if isinstance(group, dict):
            fixed |= {name: token_text(value, f"{path}: {name}") for name, value in group.items()}
    return Declared(standard | further | fixed, fixed, _unnamed(values, path))


def _unnamed(values: Mapping[str, Any], path: Path) -> list[str] | None:
    """Return the tokens in the first list without names, or None."""
    for key in (EXTRA, EXTRA_BEFORE_5):
        listed = values.get(key)
        if isinstance(listed, list):
            return [token_text(value, f"{path}: {key}") for value in listed]
    return None


def merged(first: Declared, second: Declared, *, join: bool) -> Declared:
    """Merge the tokens of two files.

    Names in the second file override names in the first, except fixed names. With `join`, the second list is appended to the
    first list. If there is no first list, the second is used.
    """
    unnamed = first.unnamed
    if unnamed is None:
        unnamed = second.unnamed
    elif join:
        unnamed = list(dict.fromkeys([*unnamed, *(second.unnamed or ())]))
    return Declared(first.by_name | second.by_name | first.fixed, first.fixed, unnamed)


def token_text(value: Any, where: str) -> str:
    """Return the text of a token, which may be stored in an object."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"{where} must be a string: {short_repr(value)}")
    return text
