"""The tokens that begin and end a text. `tokenizer.json` does not name them; two files of transformers beside it do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxgpt.config import UserError
from jaxgpt.errors import short_repr
from jaxgpt.files import read_bytes, read_json

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # since transformers 5 a file of its own
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a model, as the files beside its tokenizer.json name them. Export writes both files again.

    Attributes:
        generation: the content of generation_config.json, ids that only config.json names included.
        tokenizer: of tokenizer_config.json the tokens and the chat template. Its `add_bos_token` is not used, as in
            transformers 5: tokenizer.json says what is added to a text.
    """

    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids each of which ends a text."""
        return _as_ids(self.generation.get("eos_token_id"))

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, whether or not the tokenizer adds it."""
        return next(iter(_as_ids(self.generation.get("bos_token_id"))), None)

    @property
    def names(self) -> dict[str, str]:
        """The tokens by their names in chat templates: `bos_token`, `eos_token`, `pad_token`, `unk_token`."""
        return {name: self.tokenizer[name] for name in TOKENS if name in self.tokenizer}

    @property
    def chat_template(self) -> str | None:
        """The chat template; of several, the one named `default`."""
        template = self.tokenizer.get("chat_template")
        if isinstance(template, list):
            return next((each["template"] for each in template if each["name"] == "default"), None)
        return template


def read_special(folder: Path, config: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Read the special tokens of a folder: generation_config.json, tokenizer_config.json, chat_template.jinja, all optional.

    Args:
        folder: where they lie.
        config: of a transformers model, its config.json: the ids that generation_config.json leaves open.

    Raises:
        UserError: a file that cannot be read, or a token or id of the wrong type.
    """
    generation = {name: config[name] for name in IDS if config and config.get(name) is not None}
    if (folder / GENERATION).is_file():
        found = read_json(folder / GENERATION)
        generation = found | {name: generation[name] for name in generation if found.get(name) is None}
    for name in IDS:
        value = generation.get(name)
        if value is not None and any(type(i) is not int for i in (value if isinstance(value, list) else [value])):
            raise UserError(
                f"{folder / GENERATION}: {name} must be an integer or a list of integers: {short_repr(value)}"
            )
    return SpecialTokens(generation, _read_tokenizer_config(folder))


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path, kept = folder / TOKENIZER, dict[str, Any]()
    values = read_json(path) if path.is_file() else {}  # model_max_length is often 10^30
    for name in TOKENS:
        if (token := values.get(name)) is not None:
            kept[name] = _token(token, f"{path}: {name}")
    more = values.get("additional_special_tokens")
    if more is not None:
        if not isinstance(more, list):
            raise UserError(f"{path}: additional_special_tokens must be a list: {short_repr(more)}")
        kept["additional_special_tokens"] = [_token(token, f"{path}: additional_special_tokens") for token in more]
    template = values.get("chat_template")
    if (folder / TEMPLATE).is_file():
        path = folder / TEMPLATE
        try:
            template = read_bytes(path).decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{path} is not UTF-8 text (byte {e.start})") from None
    if template is not None:
        named = isinstance(template, list) and all(
            isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
            for one in template
        )
        if not isinstance(template, str) and not named:
            raise UserError(f"{path}: chat_template must be a string, or a list of names and templates")
        kept["chat_template"] = template
    return kept


def _token(value: Any, where: str) -> str:
    """A token's text; older files write it as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"{where} must be a string: {short_repr(value)}")
    return text


def _as_ids(value: Any) -> tuple[int, ...]:
    """One id or a list; a negative one stands for none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))
