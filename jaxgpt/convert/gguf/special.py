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
TEMPLATES = "tokenizer.chat_templates"  # key of the list of the names of templates, without the default
# Keys of the ids of special tokens in the metadata.
BOS = f"{GGML}bos_token_id"
EOS = f"{GGML}eos_token_id"
EOT = f"{GGML}eot_token_id"  # end of a turn
EOM = f"{GGML}eom_token_id"  # end of a message, after a call of a tool
PAD = f"{GGML}padding_token_id"
UNK = f"{GGML}unknown_token_id"
END_KEYS = (EOS, EOT, EOM)  # llama.cpp stops at each of these ids
# Names in tokenizer_config.json; the other keys have no name there.
NAMES = {BOS: "bos_token", EOS: "eos_token", PAD: "pad_token", UNK: "unk_token"}
NO_TOKEN = 2**32 - 1  # llama.cpp's -1 as an unsigned integer, for a special token that the model lacks
SENTENCEPIECE_IDS = {UNK: 0, BOS: 1, EOS: 2}  # defaults of the tokenizer "llama"
# Control tokens that end a turn; llama.cpp recognizes them by name.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>")
# Variables of chat templates that llama.cpp defines, and the keys of their ids.
LLAMACPP_VARIABLES = {"bos_token": BOS, "eos_token": EOS}


def read_special_tokens(metadata: Mapping[str, Any], where: str) -> SpecialTokens:
    """Read the special tokens and the chat template of a GGUF file.

    Raises:
        UserError: if the tokens or their types are malformed, or a special id is not an integer below the number of tokens.
    """
    template = _templates(metadata)
    entries: dict[str, Any] = {} if template is None else {"chat_template": template}
    tokens = read_array(metadata, "tokens", str, where)
    types = read_array(metadata, "token_type", int, where)
    if not tokens:
        return SpecialTokens({}, entries)

    ids = _read_ids(metadata, len(tokens), where)
    for key, name in NAMES.items():
        if key in ids:
            entries[name] = tokens[ids[key]]

    generation = _generation(ids, _turn_ends(tokens, types))
    return SpecialTokens(generation, entries)


def _generation(ids: Mapping[str, int], turn_ends: Sequence[int]) -> dict[str, Any]:
    """Return the entries of generation_config.json, from ids keyed as in the metadata, and further ids that end a turn."""
    generation: dict[str, Any] = {}
    if BOS in ids:
        generation["bos_token_id"] = ids[BOS]
    if PAD in ids:
        generation["pad_token_id"] = ids[PAD]
    ends = [ids[key] for key in END_KEYS if key in ids]
    ends = list(dict.fromkeys([*ends, *turn_ends]))
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return generation


def _turn_ends(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Return the ids of the control tokens in `TURN_ENDS`; [] if the file has no types."""
    typed = enumerate(zip(tokens, types, strict=False))
    return [i for i, (token, kind) in typed if token in TURN_ENDS and kind == CONTROL]


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


def _read_ids(metadata: Mapping[str, Any], vocab_size: int, where: str) -> dict[str, int]:
    """Return the ids of special tokens, keyed as in the metadata; raise `UserError` for an id outside the vocabulary."""
    ids: dict[str, int] = {}
    if metadata.get(f"{GGML}model") == "llama":
        ids = {key: i for key, i in SENTENCEPIECE_IDS.items() if i < vocab_size}
    for key in (*END_KEYS, BOS, PAD, UNK):
        value = metadata.get(key)
        if value is None or value == NO_TOKEN:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise UserError(f"{where}: {key} must be an id below {vocab_size}: {short_repr(value)}; {OTHER}")
        ids[key] = value
    return ids


def describe_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of the special tokens and chat templates; `tokens`: token of each id in the file."""
    ids = _described_ids(tokenizer)
    metadata: dict[str, Any] = {**ids, f"{GGML}add_bos_token": bool(tokenizer.bos_ids)}

    defined = {variable: tokens[ids[key]] for variable, key in LLAMACPP_VARIABLES.items() if key in ids}
    suffixes: list[str] = []
    for name, source in tokenizer.special.templates.items():
        template = _described_template(tokenizer.special, source, defined)
        if name == "default":
            metadata[TEMPLATE] = template
        else:
            suffix = re.sub(r"[^A-Za-z0-9]", "_", name)  # as in llama.cpp's package gguf
            suffixes.append(suffix)
            metadata[f"{TEMPLATE}.{suffix}"] = template
    if suffixes:
        metadata[TEMPLATES] = suffixes
    return metadata


def _described_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, keyed as in the metadata.

    End ids have an order, but no names, so the second and third id get the keys of eot and eom: llama.cpp stops at all three.
    A fourth id has no key: llama.cpp stops at it only if it recognizes the name of its token (`TURN_ENDS`).
    """
    ids: dict[str, int | None] = dict(zip(END_KEYS, tokenizer.end_ids, strict=False))
    ids[BOS] = next(iter(tokenizer.bos_ids), tokenizer.special.bos_id)
    ids[PAD] = tokenizer.special.generation.get("pad_token_id")
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
