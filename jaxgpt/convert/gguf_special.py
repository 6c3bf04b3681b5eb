"""Special tokens and chat templates in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgpt.convert.gguf_vocabulary import CONTROL, GGML, OTHER, read_array
from jaxgpt.data.special import SpecialTokens
from jaxgpt.errors import UserError, short_repr

TEMPLATE = "tokenizer.chat_template"  # with a dot and a name: a template with this name
TEMPLATES = "tokenizer.chat_templates"  # names of templates
# Keys of special tokens in the metadata, and their names in transformers.
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
