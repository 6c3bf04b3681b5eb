"""Describe a tokenizer in the metadata of a GGUF file.

A byte-level BPE is identified by the name of its pre-tokenizer, and a SentencePiece BPE has scores. Characters and bytes use
llama.cpp's RWKV tokenizer: it finds the longest token, and has no default special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgpt.convert.gguf_compare import compare, prepend_scheme
from jaxgpt.convert.gguf_special import TEMPLATE, TEMPLATES
from jaxgpt.convert.gguf_tokenizer import escaped, read_tokenizer
from jaxgpt.convert.gguf_vocabulary import BYTE, CONTROL, GGML, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from jaxgpt.convert.templates import definition
from jaxgpt.data.cuts import GPT2, LLAMA3, word_pattern
from jaxgpt.data.subword import SubwordTokenizer
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.errors import UserError

UNSCORED = -1e6  # score of a token that no merge forms
NAMES = {GPT2: "gpt-2", LLAMA3[1]: "qwen2"}
LLAMACPP_NAMES = ("bos_token", "eos_token")  # variables of chat templates in llama.cpp
# Variables that llama.cpp sets to true if a template reads them, even if its caller passes no value.
ALWAYS = ("enable_thinking",)
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class Description(NamedTuple):
    """A tokenizer in the metadata of a GGUF file."""

    metadata: dict[str, Any]
    note: str  # texts with special tokens or leading spaces that have different ids in llama.cpp; empty: none


def describe(tokenizer: Tokenizer, vocab_size: int) -> Description:
    """Describe a tokenizer in metadata, for a model with `vocab_size` ids.

    Raises:
        UserError: if llama.cpp has no tokenizer that computes the same ids.
    """
    if isinstance(tokenizer, (ByteTokenizer, CharTokenizer)):
        values = _longest_match(tokenizer)
    elif isinstance(tokenizer, SubwordTokenizer):
        values = _subwords(tokenizer)
    else:
        raise UserError("GGUF files have no tokenizer of words or ids: train with data.tokenizer bpe, char or byte")
    values |= _padding(values, vocab_size)
    values |= _special_ids(tokenizer)
    metadata = {f"{GGML}{name}": value for name, value in values.items()}
    metadata |= _templates(tokenizer, values)
    read = read_tokenizer(metadata, "the exported file")
    return Description(metadata, compare(read, tokenizer))


def _padding(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Extend the lists of tokens to all ids of the model; ids without a token, such as padding, are unused tokens."""
    missing = range(len(values["tokens"]), vocab_size)
    padded = {
        "tokens": values["tokens"] + [f"[PAD{i}]" for i in missing],
        "token_type": values["token_type"] + [UNUSED for _ in missing],
    }
    if "scores" in values:
        padded["scores"] = values["scores"] + [UNSCORED for _ in missing]
    return padded


def _templates(tokenizer: Tokenizer, values: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the chat templates; names have letters, digits and underscores."""
    metadata = dict[str, Any]()
    names = list[str]()
    for name, source in tokenizer.special.templates.items():
        key = TEMPLATE
        if name != "default":
            names.append(re.sub(r"[^A-Za-z0-9]", "_", name))
            key = f"{TEMPLATE}.{names[-1]}"
        metadata[key] = _template(tokenizer, source, values)
    return metadata | {TEMPLATES: names} if names else metadata


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of special tokens, and whether a text begins with the beginning-of-text token."""
    generation = tokenizer.special.generation
    bos = next(iter(tokenizer.bos_ids), tokenizer.special.bos_id)
    ids: dict[str, Any] = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), tokenizer.end_ids, strict=False))
    ids |= {"bos_token_id": bos, "padding_token_id": generation.get("pad_token_id")}
    values: dict[str, Any] = {name: i for name, i in ids.items() if i is not None}
    return values | {"add_bos_token": bool(tokenizer.bos_ids)}


def _template(tokenizer: Tokenizer, source: str, values: Mapping[str, Any]) -> str:
    """Return a chat template that begins with definitions of the variables that it would lack in llama.cpp.

    llama.cpp defines only `bos_token` and `eos_token`, as the tokens with the ids in the metadata.
    """
    wanted = dict.fromkeys(LLAMACPP_NAMES, "") | tokenizer.special.variables
    given = {name: values["tokens"][values[f"{name}_id"]] for name in LLAMACPP_NAMES if f"{name}_id" in values}
    lines = []
    for name, token in wanted.items():
        if name in source and given.get(name) != token:
            lines.append(definition(name, token) + "\n")
    return "".join(lines) + source


def _longest_match(tokenizer: ByteTokenizer | CharTokenizer) -> dict[str, Any]:
    """Describe a tokenizer of characters or bytes."""
    if isinstance(tokenizer, CharTokenizer):
        texts = [character.encode() for character in tokenizer.words]
    else:
        texts = [bytes([value]) for value in range(256)]
    return {"model": "rwkv", "tokens": [escaped(text) for text in texts], "token_type": [NORMAL for _ in texts]}


def _subwords(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """Describe a BPE of the `tokenizers` library."""
    value = json.loads(tokenizer.to_json())
    model = value["model"]
    if model["type"] != "BPE":
        raise UserError(f"GGUF files have no tokenizer of type {model['type']}: only BPE is supported")

    # All tokens by id; the library's added tokens are matched before the merges.
    tokens = [f"[PAD{i}]" for i in range(tokenizer.vocab_size)]
    types = [UNUSED for _ in tokens]
    for token, i in model["vocab"].items():
        tokens[i] = token
        types[i] = NORMAL
    for added in value["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED

    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    if not merges:
        raise UserError("GGUF files have no BPE without merges: train with data.tokenizer byte")
    values = {"tokens": tokens, "token_type": types}
    if model["byte_fallback"]:
        return values | _sentencepiece(value, values, merges)
    name = _pre_tokenizer(value)
    if not name:
        raise UserError(
            "llama.cpp has no pre-tokenizer that splits words as in this tokenizer.json: export a directory"
        )
    return values | {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in merges]}


def _pre_tokenizer(value: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a tokenizer.json, or "" if there is no equivalent.

    NFC is the only accepted normalizer, although llama.cpp does not apply it.
    """
    if (value["normalizer"] or {}).get("type") not in (None, "NFC"):
        return ""
    pre = value["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [])
    if len(steps) == 2 and steps[0] == DIGITS:
        return "smollm" if word_pattern(steps[1]) == GPT2 else ""
    pattern = word_pattern(pre)
    if pattern == LLAMA3[0]:
        return "llama-bpe" if value["model"]["ignore_merges"] else "dbrx"
    return NAMES.get(pattern, "")


def _sentencepiece(value: Mapping[str, Any], vocabulary: Mapping[str, Any], merges: list[list[str]]) -> dict[str, Any]:
    """Describe a BPE with byte tokens: scores, the types of all tokens, and the space before a text.

    The score of a token is minus the rank of its first merge.
    """
    tokens: list[str] = vocabulary["tokens"]
    unknown = value["model"]["unk_token"]
    types = []
    for token, kind in zip(tokens, vocabulary["token_type"], strict=True):
        if token == unknown and kind == CONTROL:
            types.append(UNKNOWN)  # found in a text, like a control token
        elif token in BYTE_NAMES and kind == NORMAL:
            types.append(BYTE)
        else:
            types.append(kind)

    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    scores = [-float(rank[token]) if token in rank else UNSCORED for token in tokens]
    values = {
        "model": "llama",
        "pre": "default",
        "token_type": types,
        "scores": scores,
        "add_space_prefix": _begins_with_space(value),
    }
    if unknown in tokens:
        values["unknown_token_id"] = tokens.index(unknown)
    return values


def _begins_with_space(value: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json adds a space to the beginning of a text."""
    if prepend_scheme(value) != "never":
        return True
    normalizer = value["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Prepend" and step["prepend"] == SPACE for step in steps)
