"""N-gram models fitted on the training ids of data, and evaluated on its validation ids."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxgpt.data import Mixture, Packed, Split, Tokens
from jaxgpt.report.blocks import sample
from jaxgpt.report.ngrams import cross_entropies, trigrams


class FittedNgrams(NamedTuple):
    """Evaluated n-gram models.

    Attributes:
        losses: losses of the uniform, unigram, bigram and trigram models in nats per token, keyed by these names.
        counted_tokens: number of trigrams that the models are fitted on.
        evaluated_tokens: number of trigrams that the models are evaluated on.
    """

    losses: dict[str, float]
    counted_tokens: int
    evaluated_tokens: int


def fit_ngrams(train: Split, val: Split, vocab_size: int, counted: int, evaluated: int) -> FittedNgrams | None:
    """Fit n-gram models on up to `counted` training ids; evaluate on up to `evaluated` validation ids.

    A mixture counts the ids of all sources regardless of their weights. Returns None if a split has no trigram.
    """
    fitted = np.concatenate([_trigrams(train, vocab_size, *block) for block in sample(len(train), counted)])
    tested = np.concatenate([_trigrams(val, vocab_size, *block) for block in sample(len(val), evaluated)])
    if not len(fitted) or not len(tested):
        return None
    losses = {"uniform": math.log(vocab_size)} | cross_entropies(fitted, tested, vocab_size)
    return FittedNgrams(losses, counted_tokens=len(fitted), evaluated_tokens=len(tested))


def _trigrams(split: Split, base: int, start: int, n: int) -> np.ndarray:
    """Return the keys of trigrams within documents in n ids from `start`; in conversations, only if they end in a target."""
    if isinstance(split, Mixture):
        parts = split.parts(start, n)
        return np.concatenate([_trigrams(split.sources[index], base, *block) for index, *block in parts])
    if isinstance(split, Packed) and split.is_target is None:
        return _trigrams(split.tokens, base, start, n)

    ids = split.take(start, n)
    keys = trigrams(ids, base)
    if isinstance(split, Packed) and split.is_target is not None:
        # A trigram is within a conversation if its last token is not one of the conversation's first two tokens.
        index = np.arange(start, start + n)
        begins = np.sort(split.begins)
        conversation = np.searchsorted(begins, index, side="right") - 1
        is_inside = index >= begins[conversation] + 2
        is_counted = is_inside & split.is_target[start : start + n]
        return keys[is_counted[2:]]
    if isinstance(split, Tokens) and split.end_ids:
        ends = np.isin(ids, split.end_ids)
        return keys[~(ends[:-2] | ends[1:-1])]
    return keys
