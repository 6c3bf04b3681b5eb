"""Compare tokenizers: whether two tokenizers produce the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError

# Texts to compare tokenizers with equal vocabularies and merges.
PROBES = (
    "It's 1,234 o'clock\n\n\tin the  café -- don't <|endoftext|> 東京 we'll\r\n",
    "  leading and trailing  ",
    " one space before, cafe\u0301 and \ufb01 ",
    "\n\nIT'S  \u00a0\u3000 12345678 \U0001f44d\U0001f3fd",
)


def same_ids(model_tokenizer: Tokenizer, data_tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer of a model produces the same ids as the tokenizer of the data.

    Vocabularies, merges, added tokens and ids of probe texts are compared. Either tokenizer may lack special tokens, because
    their names in a text are ordinary text. Only the tokens that begin or end documents must be in the model's tokenizer.
    """
    model_json = json.loads(model_tokenizer.to_json())
    data_json = json.loads(data_tokenizer.to_json())
    if _not_special(model_json) != _not_special(data_json):
        return False

    model_tokens = _added(model_json)
    around_documents = {*data_tokenizer.bos_ids, data_tokenizer.eos_id} - {None}
    for name, token in _added(data_json).items():
        if token["id"] in around_documents and name not in model_tokens:
            return False
    return same_vocabulary(model_tokenizer, data_tokenizer)


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether two tokenizers produce the same ids for probe texts, and no id has two meanings.

    Either tokenizer may have further added tokens.
    """
    a_json = json.loads(a.to_json())
    b_json = json.loads(b.to_json())
    if any(a_json["model"].get(key) != b_json["model"].get(key) for key in ("type", "vocab", "merges")):
        return False

    # No added token has two ids, and no id has two added tokens.
    a_tokens = _added(a_json)
    names = {token["id"]: name for name, token in a_tokens.items()}
    for name, token in _added(b_json).items():
        has_two_names = names.get(token["id"], name) != name
        has_two_ids = a_tokens.get(name, token)["id"] != token["id"]
        if has_two_names or has_two_ids:
            return False
    return all(_encoded(a, text) == _encoded(b, text) for text in PROBES)


def _added(tokenizer_json: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the added tokens of a tokenizer.json, keyed by name."""
    return {token["content"]: token for token in tokenizer_json["added_tokens"]}


def _not_special(tokenizer_json: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the added tokens that are not special; without a normalizer, their option `normalized` has no effect."""
    tokens = {name: token for name, token in _added(tokenizer_json).items() if not token["special"]}
    if tokenizer_json.get("normalizer") is None:
        tokens = {name: token | {"normalized": False} for name, token in tokens.items()}
    return tokens


def _encoded(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return the ids of a text; None: the tokenizer cannot encode it."""
    try:
        ids: list[int] = tokenizer.encode(text).tolist()
    except UserError:  # a character or word outside the vocabulary
        return None
    return ids
