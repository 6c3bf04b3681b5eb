"""Describe a tokenizer in the metadata of a GGUF file.

A byte-level BPE is identified by the name of its pre-tokenizer, and a SentencePiece BPE has scores. Characters and bytes use
llama.cpp's RWKV tokenizer: it finds the longest token, and has no default special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken

from jaxgpt.convert.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GGML,
    NORMAL,
    SPACE,
    TEMPLATE,
    TEMPLATES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    escaped,
    read_tokenizer,
)
from jaxgpt.convert.templates import definition
from jaxgpt.data.cuts import GPT2, LLAMA3, word_pattern
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, SubwordTokenizer, Tokenizer
from jaxgpt.errors import UserError

UNSCORED = -1e6  # score of a token that no merge forms
NAMES = {GPT2: "gpt-2", LLAMA3[1]: "qwen2"}
LLAMACPP_NAMES = ("bos_token", "eos_token")  # variables of chat templates in llama.cpp
# Variables that llama.cpp sets to true if a template reads them, even if its caller passes no value.
ALWAYS = ("enable_thinking",)
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Texts for comparing the tokenizer of a file with the original.
PROBES = (
    "def f(x):\n    return  x**2 + 1000000\t# ok\r\n\r\n",
    "a     b          c\n\n\n   d",
    "I'll we've CAN'T it's 12345678901 3.14 \u00bd",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d \u2026 \u20ac5",
    "\u6f22\u5b57\u3068\u304b\u306a\u3001\ud55c\uad6d\uc5b4 \u05d0\u05d1\u05d2 \u0639\u0631\u0628\u064a",
    "\U0001f468\u200d\U0001f469 \U0001f44d\U0001f3fd <|endoftext|> <s> </s> <unk> leading and trailing  ",
    " one space before",
    "   three spaces before",
    "\n\n line breaks before",
)
# Text with an added token at both ends, and adjacent to spaces, letters, line breaks and itself.
AROUND = "{0} a {0}b{0}  c {0}\n{0}{0} d\n {0}"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # options of added tokens without an equivalent in llama.cpp


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
    return Description(metadata, _compare(read, tokenizer))


def _compare(read: Tokenizer, tokenizer: Tokenizer) -> str:
    """Compare the tokenizer that is read from a file with the original, and return the note of `Description`.

    Raises:
        UserError: if ids differ in a way that the note does not describe.
    """
    spaces = spaces_note(tokenizer)
    different = [token for token in _added_tokens(tokenizer) if _differs(token, read, tokenizer, bool(spaces))]
    note = "; ".join(filter(None, [spaces, _tokens_note(different)]))
    _check_bos(read, tokenizer)
    _check_added(different)
    for text in _probes(tokenizer, bool(spaces)):
        if not _same_ids(read, tokenizer, text, special=not note):
            raise UserError(f"llama.cpp has no tokenizer that computes the same ids for {text!r}: export a directory")
    return note


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


def _check_bos(read: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if texts begin with different tokens."""
    if read.bos_ids != tokenizer.bos_ids:
        raise UserError(
            f"llama.cpp begins a text with at most one token, but this tokenizer with {tokenizer.decode(tokenizer.bos_ids)}: "
            f"export a directory"
        )


def _check_added(different: Sequence[AddedToken]) -> None:
    """Raise `UserError` if any differently matched token is not special, because any text may contain it."""
    for token in different:
        if not token.special:
            raise UserError(
                f"llama.cpp has no added token that matches as {_shown(token)} in tokenizer.json: export a directory"
            )


def _probes(tokenizer: Tokenizer, has_other_spaces: bool) -> list[str]:
    """Return the texts whose ids must be equal; `has_other_spaces`: llama.cpp adds a space before a leading space."""
    probes = [text for text in PROBES if not (has_other_spaces and text.startswith(" "))]
    if isinstance(tokenizer, CharTokenizer):
        return ["".join(character for character in text if character in tokenizer.words) for text in probes]
    return probes


def _tokens_note(different: Sequence[AddedToken]) -> str:
    """Describe the special tokens that llama.cpp matches differently; "": none."""
    special = [token for token in different if token.special]
    if not special:
        return ""
    more = f" and {len(special) - 1:,} more" if len(special) > 1 else ""
    return f"llama.cpp matches the special token {_shown(special[0])}{more} differently between other texts"


def _differs(token: AddedToken, read: Tokenizer, tokenizer: Tokenizer, has_other_spaces: bool) -> bool:
    """Return whether llama.cpp matches an added token differently; `read` is llama.cpp's tokenizer.

    If llama.cpp adds other spaces, all ids around tokens differ, so the result depends only on the options of the token.
    """
    if has_other_spaces:
        return token.single_word or token.lstrip or token.rstrip
    return not _same_ids(read, tokenizer, AROUND.format(token.content))


def _added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    """Return the added tokens of a tokenizer, in the order of their ids."""
    if not isinstance(tokenizer, SubwordTokenizer):
        return []
    return [token for _, token in sorted(tokenizer.library.get_added_tokens_decoder().items())]


def _shown(token: AddedToken) -> str:
    """Format an added token with its options that llama.cpp lacks."""
    flags = [name for name in FLAGS if getattr(token, name)]
    return f"{token.content!r} ({' and '.join(flags)})" if flags else repr(token.content)


def _same_ids(one: Tokenizer, other: Tokenizer, text: str, special: bool = True) -> bool:
    """Return whether two tokenizers encode a text equally, as plain text and, if `special`, with its special tokens."""
    as_text = np.array_equal(one.encode(text), other.encode(text))
    return as_text and (not special or np.array_equal(one.encode_special(text), other.encode_special(text)))


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
    if _scheme(value) != "never":
        return True
    normalizer = value["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Prepend" and step["prepend"] == SPACE for step in steps)


def _scheme(value: Mapping[str, Any]) -> str:
    """Return the `prepend_scheme` of the pre-tokenizer Metaspace of a tokenizer.json: first, always or never."""
    pre = value["pre_tokenizer"] or {}
    return pre.get("prepend_scheme", "never")


def spaces_note(tokenizer: Tokenizer) -> str:
    """Describe the texts that begin with an added space only in llama.cpp; "": none."""
    if not isinstance(tokenizer, SubwordTokenizer):
        return ""
    scheme = _scheme(json.loads(tokenizer.library.to_str()))
    if scheme == "never":
        return ""
    others = "texts that begin with a space"
    if scheme == "first":
        others += ", and to texts after a special token"
    return f"unlike this tokenizer, llama.cpp adds a space to {others}"
