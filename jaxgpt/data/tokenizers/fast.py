"""Encode with tiktoken, 4x faster than `tokenizers`, if both produce the same ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from jaxgpt.data.tokenizers.base import END_OF_TEXT, Tokenizer
from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.data.tokenizers.word_patterns import word_pattern
from jaxgpt.errors import UserError

# Options of a BPE in tokenizer.json that tiktoken lacks.
UNSUPPORTED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


def fast_encoder(tokenizer: Tokenizer) -> Callable[[str], np.ndarray] | None:
    """Return a faster `tokenizer.encode`; None without tiktoken, or if its ids may differ."""
    if not find_spec("tiktoken") or not isinstance(tokenizer, SubwordTokenizer):
        return None
    import tiktoken

    value = json.loads(tokenizer.to_json())
    pattern = word_pattern(value["pre_tokenizer"])
    if not pattern:
        return None
    ranks = _ranks(tokenizer, value)
    if not ranks:
        return None
    # Without any special token, tiktoken takes 1.5x as long. The name of this token is encoded as ordinary text.
    special = {END_OF_TEXT: max(ranks.values()) + 1}
    encoding = tiktoken.Encoding("jaxgpt", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode(text: str) -> np.ndarray:
        """Encode with tiktoken or, if the text exceeds a limit of tiktoken's regular expressions, with the tokenizer."""
        try:
            return call_tokenizers(lambda: encoding.encode_to_numpy(text, disallowed_special=()), "this text")
        except UserError:
            return tokenizer.encode(text)

    return encode


def _ranks(tokenizer: SubwordTokenizer, value: dict[str, Any]) -> dict[bytes, int]:
    """Return the token ids, keyed by the tokens' bytes, or {} if tiktoken may merge differently.

    `tokenizers` merges a pair of tokens if `merges` lists the pair; tiktoken merges it if the concatenation is a token. The
    results are equal if `merges` is in the order of the merged tokens' ids, and `tokenizers` encodes the text of every token
    to this token alone. Proof: take the first pair (x, y) that only tiktoken merges, into a token t. So far, no merge crossed
    the ends of t, so encoding t alone reaches (x, y). The result is t alone, so `tokenizers` also merges (x, y): the pair is
    listed.
    """
    model = value["model"]
    is_plain_bpe = model["type"] == "BPE" and not any(map(model.get, UNSUPPORTED))
    has_only_special = all(token["special"] for token in value["added_tokens"])
    if not is_plain_bpe or not has_only_special or value["normalizer"]:
        return {}

    merged = [a + b for a, b in model["merges"]]
    tokens = dict.fromkeys([*BYTE_VOCAB, *merged])  # without duplicates
    ids = {token: model["vocab"].get(token, -1) for token in tokens}

    are_of_bytes = set("".join(merged)) <= BYTE_VOCAB.keys()
    merges_by_id = merged == sorted(set(merged), key=ids.__getitem__)
    if not are_of_bytes or not merges_by_id:
        return {}
    for token, i in ids.items():
        encoded = tokenizer.library.model.tokenize(token)
        if [part.id for part in encoded] != [i]:
            return {}
    return {bytes(BYTE_VOCAB[c] for c in token): i for token, i in ids.items()}
