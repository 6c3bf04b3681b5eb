"""Tokens without an embedding in the model: remove them from the tokenizer, and describe them."""

from __future__ import annotations

import json

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, read_library
from jaxgpt.errors import plural

SHOWN = 8  # maximum number of tokens in a note


def without_ids_from(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Return a tokenizer without added tokens with ids of `vocab_size` or above, such as Gemma 3's `<image_soft_token>`."""
    if tokenizer.vocab_size <= vocab_size or not isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    value = json.loads(tokenizer.to_json())
    removed = {token["content"] for token in value["added_tokens"] if token["id"] >= vocab_size}
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] not in removed]
    vocab = value["model"].get("vocab")
    if isinstance(vocab, dict):  # a Unigram model has a list without added tokens
        value["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in removed}

    smaller = SubwordTokenizer(read_library(json.dumps(value), "this vocabulary"))
    smaller.special = tokenizer.special.without(removed, vocab_size)
    return smaller


def note_on_removed(whole: Tokenizer, smaller: Tokenizer) -> str:
    """Return a note on the tokens that `without_ids_from` removed, or ""."""
    removed = range(smaller.vocab_size, whole.vocab_size)
    if not removed:
        return ""
    names = ", ".join(filter(None, (whole.decode([i]) for i in removed[:SHOWN])))
    more = ", ..." if len(removed) > SHOWN else ""
    tokens = plural(len(removed), "token")
    return f"the embedding has no rows for {tokens} of the tokenizer, so the names are ordinary text: {names}{more}"
