"""Encode the continuation of a text, so that, if possible, the ids of both decode to their concatenation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxgpt.data.tokenizers.base import Ids, Tokenizer

# Short texts of several kinds to encode before a continuation. It is unlikely that all of them share a token with the beginning
# of the continuation.
ANCHORS = ("\n", ".", "a", "0", "(", "\u6587")


def encode_continuation(tokenizer: Tokenizer, before: str | Ids, text: str) -> np.ndarray:
    """Encode the continuation of a text, so that, if possible, the ids of both decode to their concatenation.

    The continuation has the same ids as in the concatenation, unless a token of the concatenation crosses the boundary. Encoded
    separately, `text` would begin with a space in tokenizers that prepend a space to every text (Llama 2, Mistral), and with
    a new word in WordPiece.

    Args:
        tokenizer: tokenizer of both texts.
        before: the text, or its ids. No effect if the tokenizer has a `separator`: the continuation begins a new word.
        text: the continuation.

    Returns:
        Ids of the continuation, int32 `[n]`.
    """
    if tokenizer.separator or not len(before):
        return tokenizer.encode(text)
    if isinstance(before, str):
        before_text = before
        before_ids = tokenizer.encode(before)
    else:
        before_ids = np.asarray(before, np.int32)
        before_text = tokenizer.decode(before_ids)

    whole = tokenizer.encode(before_text + text)
    n = len(before_ids)
    if np.array_equal(whole[:n], before_ids):
        return whole[n:]

    # A token crosses the boundary. Take the first candidate that gives the same text.
    wanted = tokenizer.decode(whole)
    alone = tokenizer.encode(text)
    after_anchors = [*_after_anchors(tokenizer, text)]
    for ids in [alone, *after_anchors]:
        if tokenizer.decode([*before_ids, *ids]) == wanted:
            return ids
    # The text at the boundary changes, for example because characters are composed. Return ids that at least add no space.
    return after_anchors[0] if after_anchors else alone


def _after_anchors(tokenizer: Tokenizer, text: str) -> Iterator[np.ndarray]:
    """Yield the ids of a text after each anchor, except anchors that share a token with the text."""
    for anchor in ANCHORS:
        ids = tokenizer.encode(anchor)
        joined = tokenizer.encode(anchor + text)
        if len(ids) and np.array_equal(joined[: len(ids)], ids):
            yield joined[len(ids) :]
