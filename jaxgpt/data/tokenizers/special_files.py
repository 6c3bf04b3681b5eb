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

from jaxgpt.data.tokenizers.added_tokens import AddedToken, read_added_tokens, read_decoder
from jaxgpt.data.tokenizers.declared_tokens import NO_TOKENS, merged, token_text, tokens_in
from jaxgpt.data.tokenizers.special import IDS, SpecialTokens
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


class SpecialFiles(NamedTuple):
    """The contents of all files of a directory that define special tokens."""

    special: SpecialTokens
    added: list[AddedToken]  # sorted by id


def read_special_files(directory: Path, config: Mapping[str, Any] | None = None) -> SpecialFiles:
    """Read the files that define special tokens in a directory, with the same precedence as transformers.

    Args:
        directory: the directory of tokenizer.json; each file is optional.
        config: content of the model's config.json, for ids that generation_config.json lacks; None: no further ids.

    Raises:
        UserError: if a file cannot be read, or a token, id or template has the wrong type.
    """
    path = directory / TOKENIZER_CONFIG
    values = _read(path)
    in_config = tokens_in(values, path)
    if "added_tokens_decoder" in values:
        declared = merged(in_config, NO_TOKENS)
        added = read_decoder(values["added_tokens_decoder"], path)
    else:  # older directories have two more files instead
        map_path = directory / SPECIAL_TOKENS_MAP
        declared = merged(in_config, tokens_in(_read(map_path), map_path))
        added_path = directory / ADDED_TOKENS
        added = read_added_tokens(_read(added_path), declared.tokens(), added_path)

    entries = declared.entries()
    template = _read_templates(directory, values.get("chat_template"))
    if template is not None:
        entries["chat_template"] = template
    generation = _read_generation(directory, config or {})
    return SpecialFiles(SpecialTokens(generation, entries), added)


def read_tokenizer_class(directory: Path, config: Mapping[str, Any] | None = None) -> TokenizerClass:
    """Read the class of a tokenizer, which decides whether its tokenizer.json is used unchanged.

    Args:
        directory: the directory of tokenizer.json.
        config: content of the model's config.json; None: read it from the directory, if it exists.
    """
    if config is None:
        config = _read(directory / "config.json")
    return read_class(_read(directory / TOKENIZER_CONFIG), config)


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
