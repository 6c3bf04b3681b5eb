"""The special tokens that tokenizer_config.json and special_tokens_map.json declare, by name or in a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.special import EXTRA, EXTRA_BEFORE_5, TOKENS
from jaxgpt.errors import UserError, short_repr


class FileTokens(NamedTuple):
    """The special tokens in a file, by the form in which they are stored; further names are names outside `TOKENS`.

    Attributes:
        standard: tokens by the names in `TOKENS`; None: declared as null.
        objects: tokens by further names, stored as objects; None: null, or an option such as `add_bos_token`.
        strings: tokens by further names, stored as strings.
        grouped: tokens by further names, stored in a group of names, such as `{"extra_special_tokens": {"boi_token": "<x>"}}`.
        extra: list of tokens in `extra_special_tokens`; None: no such list.
        additional: list of tokens in `additional_special_tokens`; None: no such list.
    """

    standard: dict[str, str | None]
    objects: dict[str, str | None]
    strings: dict[str, str]
    grouped: dict[str, str]
    extra: list[str] | None
    additional: list[str] | None


# The tokens of a missing file.
NO_TOKENS = FileTokens(standard={}, objects={}, strings={}, grouped={}, extra=None, additional=None)


class DeclaredTokens(NamedTuple):
    """The special tokens that the files of a directory declare together."""

    standard: dict[str, str | None]  # tokens by the names in `TOKENS`; None: declared as null
    further: dict[str, str]  # tokens by other names
    unnamed: list[str]

    def tokens(self) -> set[str]:
        """Return all tokens, with and without a name."""
        standard = {token for token in self.standard.values() if token is not None}
        return {*standard, *self.further.values(), *self.unnamed}

    def entries(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json, in the spelling that transformers 4 and 5 read."""
        entries: dict[str, Any] = dict(self.standard)
        if self.further:
            entries[EXTRA] = self.further
        if self.unnamed:
            entries[EXTRA_BEFORE_5] = self.unnamed
        return entries


def tokens_in(values: Mapping[str, Any], path: Path) -> FileTokens:
    """Find the tokens in the content of tokenizer_config.json or special_tokens_map.json.

    Raises:
        UserError: if a standard name, a name in a group or an element of a list has a value that is not a token.
    """
    standard = dict[str, str | None]()
    for name in TOKENS:
        if name in values:
            value = values[name]
            standard[name] = None if value is None else token_text(value, f"{path}: {name}")

    objects = dict[str, str | None]()
    strings = dict[str, str]()
    for name, value in values.items():
        if not name.endswith("_token") or name in TOKENS:
            continue
        if isinstance(value, str):
            strings[name] = value
        else:
            content = value.get("content") if isinstance(value, dict) else None
            objects[name] = content if isinstance(content, str) else None

    grouped = dict[str, str]()
    for group in (values.get("model_specific_special_tokens"), values.get(EXTRA)):
        if isinstance(group, dict):
            grouped |= {name: token_text(value, f"{path}: {name}") for name, value in group.items()}

    extra = _listed(values, EXTRA, path)
    additional = _listed(values, EXTRA_BEFORE_5, path)
    return FileTokens(standard, objects, strings, grouped, extra, additional)


def _listed(values: Mapping[str, Any], key: str, path: Path) -> list[str] | None:
    """Return the tokens in the list of a key; None: the key has no list."""
    listed = values.get(key)
    if not isinstance(listed, list):
        return None
    return [token_text(value, f"{path}: {key}") for value in listed]


def merged(config: FileTokens, token_map: FileTokens) -> DeclaredTokens:
    """Merge the tokens of tokenizer_config.json and of special_tokens_map.json, with the same precedence as transformers."""
    # Later entries override earlier entries. transformers moves the strings of the configuration into its group before it reads
    # the map. Therefore, strings and objects of the map do not override them.
    further: dict[str, str | None] = {
        **config.objects,
        **token_map.objects,
        **token_map.strings,
        **config.strings,
        **config.grouped,
        **token_map.grouped,
    }
    declared = {name: token for name, token in further.items() if token is not None}

    # The list `extra` of the map is appended; its list `additional` is used only if there is no other list.
    unnamed = config.extra if config.extra is not None else config.additional
    if token_map.extra is not None:
        unnamed = list(dict.fromkeys([*(unnamed or ()), *token_map.extra]))
    elif unnamed is None:
        unnamed = token_map.additional
    return DeclaredTokens(config.standard | token_map.standard, declared, unnamed or [])


def token_text(value: Any, where: str) -> str:
    """Return the text of a token, which may be stored in an object."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"{where} must be a string: {short_repr(value)}")
    return text
