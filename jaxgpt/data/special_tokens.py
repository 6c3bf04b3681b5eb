"""Special tokens and chat template of a model, which files next to tokenizer.json define."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_bytes, read_json

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # since transformers 5 a separate file
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a model. Export writes both files again.

    Attributes:
        generation: content of generation_config.json, with the ids of config.json that it lacks.
        tokenizer: tokens and chat template of tokenizer_config.json.
    """

    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ids = _as_list(self.generation.get("eos_token_id"))
        return tuple(dict.fromkeys(i for i in ids if i >= 0))  # negative: none

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, even if the tokenizer does not add it."""
        return next((i for i in _as_list(self.generation.get("bos_token_id")) if i >= 0), None)

    @property
    def names(self) -> dict[str, str]:
        """Tokens by their names in chat templates: `bos_token`, `eos_token`, `pad_token`, `unk_token`."""
        return {name: self.tokenizer[name] for name in TOKENS if name in self.tokenizer}

    @property
    def chat_template(self) -> str | None:
        """The chat template."""
        return self.tokenizer.get("chat_template")


def read_special_tokens(directory: Path, config: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Read generation_config.json, tokenizer_config.json and chat_template.jinja of a directory; all are optional.

    Args:
        directory: the directory.
        config: config.json of a transformers model, for ids that generation_config.json lacks.

    Raises:
        UserError: if a file cannot be read, or a token or id has the wrong type.
    """
    path, template_path = directory / TOKENIZER, directory / TEMPLATE
    generation = read_json(directory / GENERATION) if (directory / GENERATION).is_file() else {}
    for name in IDS:
        value = (config or {}).get(name) if generation.get(name) is None else generation[name]
        if any(type(i) is not int for i in _as_list(value)):
            raise UserError(
                f"{directory / GENERATION}: {name} must be an integer or a list of integers: {short_repr(value)}"
            )
        if value is not None:
            generation[name] = value
    values = read_json(path) if path.is_file() else {}
    template = values.get("chat_template")
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict)]
        template = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if template_path.is_file():
        try:
            template = read_bytes(template_path).decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{template_path} is not UTF-8 text (byte {e.start})") from None
    tokens = {name: values.get(name) for name in TOKENS} | {"chat_template": template}
    return SpecialTokens(generation, {n: _token(v, f"{path}: {n}") for n, v in tokens.items() if v is not None})


def _token(value: Any, where: str) -> str:
    """Return the text of a token; older files contain an object."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"{where} must be a string: {short_repr(value)}")
    return text


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
