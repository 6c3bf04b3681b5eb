"""Read the special tokens of a model from transformers files next to tokenizer.json.

generation_config.json      ids that begin and end a text (missing ids: from config.json); defaults of sampling
tokenizer_config.json       names of the tokens (`bos_token`, ...), further tokens, added tokens, the chat template
special_tokens_map.json     names of the tokens; read if tokenizer_config.json has no `added_tokens_decoder`
added_tokens.json           ids of added tokens; read if tokenizer_config.json has no `added_tokens_decoder`
chat_template.jinja         the chat template, and additional_chat_templates/NAME.jinja for templates with a name;
                            used instead of the templates in tokenizer_config.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.declared_tokens import Declared, declared_in, merged, token_text
from jaxgpt.data.tokenizers.special import EXTRA, IDS, SpecialTokens
from jaxgpt.data.tokenizers.transformers_class import TokenizerClass, read_class
from jaxgpt.directories import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
)
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_bytes, read_json

OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # fields of an added token


class AddedToken(NamedTuple):
    """A token to add to the vocabulary of tokenizer.json."""

    id: int
    content: str
    options: Mapping[str, bool]  # single_word, lstrip, rstrip, normalized, special
    file: str  # the file that defines it


class SpecialFiles(NamedTuple):
    """The contents of all files of a directory that define special tokens."""

    tokens: SpecialTokens
    added: list[AddedToken]  # sorted by id
    tokenizer_class: TokenizerClass = TokenizerClass()  # options with precedence over tokenizer.json


def read_special_files(directory: Path, config: Mapping[str, Any] | None = None) -> SpecialFiles:
    """Read the files that define special tokens in a directory, with the same precedence as transformers.

    Args:
        directory: the directory of tokenizer.json; each file is optional.
        config: content of the model's config.json, for ids that generation_config.json lacks. None: config.json in the
            directory is read, but only for the class of the tokenizer.

    Raises:
        UserError: if a file cannot be read, or a token, id or template has the wrong type.
    """
    path = directory / TOKENIZER_CONFIG
    values = _read(path)
    declared = declared_in(values, path)
    if "added_tokens_decoder" in values:
        added = _read_decoder(values["added_tokens_decoder"], path)
    else:  # older directories have two more files instead
        map_path = directory / SPECIAL_TOKENS_MAP
        mapped = _read(map_path)
        declared = merged(declared, declared_in(mapped, map_path), join=EXTRA in mapped)
        added = _read_added(directory / ADDED_TOKENS, declared)

    entries = declared.entries()
    template = _read_templates(directory, values.get("chat_template"))
    if template is not None:
        entries["chat_template"] = template
    generation = _read_generation(directory, config or {})
    tokenizer_class = read_class(values, _read(directory / "config.json") if config is None else config)
    return SpecialFiles(SpecialTokens(generation, entries), added, tokenizer_class)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {}: no such file."""
    return read_json(path) if path.is_file() else {}


def _read_generation(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read generation_config.json, and fill in ids from config.json."""
    generation = _read(directory / GENERATION_CONFIG)
    for name in IDS:
        file = GENERATION_CONFIG
        value = generation.get(name)
        if value is None:
            file = "config.json"
            value = config.get(name)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int for i in ids):
            raise UserError(f"{directory / file}: {name} must be an integer or a list of integers: {short_repr(value)}")
        generation[name] = value
    return generation


def _read_decoder(values: Any, path: Path) -> list[AddedToken]:
    """Read `added_tokens_decoder`: `{"0": {"content": "<unk>", "special": true, ...}, ...}`."""
    where = f"{path}: added_tokens_decoder"
    if not isinstance(values, dict):
        raise UserError(f"{where} must be an object: {short_repr(values)}")
    added = []
    for key, value in values.items():
        if not key.isdecimal() or not isinstance(value, dict):
            raise UserError(f"{where} must map ids to objects with a content: {short_repr({key: value})}")
        content = token_text(value, f"{where}, id {key}")
        options = {name: option for name, option in value.items() if name in OPTIONS and isinstance(option, bool)}
        added.append(AddedToken(int(key), content, options, TOKENIZER_CONFIG))
    return sorted(added, key=lambda token: token.id)


def _read_added(path: Path, declared: Declared) -> list[AddedToken]:
    """Read added_tokens.json: `{"<unk>": 0, ...}`. Tokens that are also in `declared` are special."""
    special = {*declared.by_name.values(), *(declared.unnamed or ())}
    added = []
    for content, i in _read(path).items():
        if type(i) is not int or i < 0:
            raise UserError(
                f"{path}: the id of {short_repr(content)} must be an integer of at least 0: {short_repr(i)}"
            )
        is_special = content in special
        options = {"normalized": not is_special, "special": is_special}
        added.append(AddedToken(i, content, options, ADDED_TOKENS))
    return sorted(added, key=lambda token: token.id)


def _read_templates(directory: Path, configured: Any) -> Any:
    """Return the chat template as a string, several as a list of names and templates, or None."""
    in_files = []
    if (directory / CHAT_TEMPLATE).is_file():
        in_files.append({"name": "default", "template": _text(directory / CHAT_TEMPLATE)})
    for path in sorted((directory / CHAT_TEMPLATES).glob("*.jinja")):
        in_files.append({"name": path.stem, "template": _text(path)})

    where = f"{directory / TOKENIZER_CONFIG}: chat_template"
    templates = in_files or configured
    if templates is None or isinstance(templates, str):
        return templates
    if not isinstance(templates, list):
        raise UserError(f"{where} must be a string: {short_repr(templates)}")
    for named in templates:
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise UserError(f"{where} must be a string, or a list of names and templates: {short_repr(named)}")
        token_text(named.get("template"), where)
    if len(templates) == 1 and templates[0]["name"] == "default":
        return templates[0]["template"]
    return templates


def _text(path: Path) -> str:
    """Return the content of a text file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}): convert it to UTF-8") from None
