"""Read and write special tokens and chat templates in the metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgpt.convert.gguf.vocabulary import CONTROL, GGML, OTHER, read_array
from jaxgpt.convert.templates import definition
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError, short_repr

TEMPLATE = "tokenizer.chat_template"  # key of the default template; with the suffix .NAME: of a named template
TEMPLATES = "tokenizer.chat_templates"  # names of templates
# Map from the names of special tokens, as in transformers, to their keys in the metadata.
SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "pad": "padding_token_id",
    "unk": "unknown_token_id",
}
NO_TOKEN = 2**32 - 1  # llama.cpp's -1 as an unsigned integer, for a special token that the model lacks
SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}  # defaults of the tokenizer "llama"
# Control tokens that end a turn; llama.cpp recognizes them by name.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>")
# Variables of chat templates that llama.cpp defines, and the keys of their ids.
LLAMACPP_VARIABLES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}


def read_special_tokens(metadata: Mapping[str, Any], where: str) -> SpecialTokens:
    """Read the special tokens and the chat template of a GGUF file.

    Raises:
        UserError: if the id of a token is not an integer below the number of tokens.
    """
    tokens = read_array(metadata, "tokens", str, where)
    types = read_array(metadata, "token_type", int, where)
    template = _templates(metadata)
    names: dict[str, Any] = {} if template is None else {"chat_template": template}
    if not tokens:
        return SpecialTokens({}, names)
    ids = _special_ids(metadata, tokens, where)
    turn_ends = [i for i, token in enumerate(tokens) if token in TURN_ENDS and types[i : i + 1] == [CONTROL]]

    generation: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends = list(dict.fromkeys(ends + turn_ends))
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    names |= {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad", "unk") if name in ids}
    return SpecialTokens(generation, names)


def _templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the chat template of a file, several as a list of names and templates, or None."""
    named = list[dict[str, str]]()
    for key, value in metadata.items():
        if isinstance(value, str) and key.startswith(f"{TEMPLATE}."):
            named.append({"name": key.removeprefix(f"{TEMPLATE}."), "template": value})
    default = metadata.get(TEMPLATE)
    if not isinstance(default, str):
        return named or None
    return [{"name": "default", "template": default}, *named] if named else default


def _special_ids(metadata: Mapping[str, Any], tokens: list[str], where: str) -> dict[str, int]:
    """Return the ids of special tokens, keyed by the names in `SPECIAL`."""
    ids: dict[str, int] = {}
    if metadata.get(f"{GGML}model") == "llama":
        ids = {name: i for name, i in SENTENCEPIECE_IDS.items() if i < len(tokens)}
    for name, key in SPECIAL.items():
        value = metadata.get(f"{GGML}{key}")
        if value is None or value == NO_TOKEN:
            continue
        if type(value) is not int or not 0 <= value < len(tokens):
            raise UserError(f"{where}: {GGML}{key} must be an id below {len(tokens)}: {short_repr(value)}; {OTHER}")
        ids[name] = value
    return ids


def describe_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of the special tokens and chat templates; `tokens`: token of each id in the file."""
    ids = _described_ids(tokenizer)
    metadata: dict[str, Any] = {f"{GGML}{key}": i for key, i in ids.items()}
    metadata[f"{GGML}add_bos_token"] = bool(tokenizer.bos_ids)

    defined = {name: tokens[ids[key]] for name, key in LLAMACPP_VARIABLES.items() if key in ids}
    names: list[str] = []
    for name, source in tokenizer.special.templates.items():
        template = _described_template(tokenizer.special, source, defined)
        if name == "default":
            metadata[TEMPLATE] = template
        else:
            names.append(re.sub(r"[^A-Za-z0-9]", "_", name))
            metadata[f"{TEMPLATE}.{names[-1]}"] = template
    if names:
        metadata[TEMPLATES] = names
    return metadata


def _described_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, keyed as in the metadata."""
    ids: dict[str, Any] = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), tokenizer.end_ids, strict=False))
    ids["bos_token_id"] = next(iter(tokenizer.bos_ids), tokenizer.special.bos_id)
    ids["padding_token_id"] = tokenizer.special.generation.get("pad_token_id")
    return {key: i for key, i in ids.items() if i is not None}


def _described_template(special: SpecialTokens, source: str, defined: Mapping[str, str]) -> str:
    """Return a chat template that begins with definitions of the variables that llama.cpp lacks or defines differently.

    `defined`: values of the variables that llama.cpp defines.
    """
    wanted = dict.fromkeys(LLAMACPP_VARIABLES, "") | special.variables
    lines = []
    for name, token in wanted.items():
        if name in source and defined.get(name) != token:
            lines.append(definition(name, token) + "\n")
    return "".join(lines) + source
