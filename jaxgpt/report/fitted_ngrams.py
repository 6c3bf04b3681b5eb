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

    A mixture counts the ids of all sources regardless of their weights. Returns None if a split has no trigram. `counted` and
    `evaluated` as `limit` in `sample`.
    """
    fitted = _sampled_trigrams(train, vocab_size, counted)
    tested = _sampled_trigrams(val, vocab_size, evaluated)
    if not len(fitted) or not len(tested):
        return None
    losses = {"uniform": math.log(vocab_size)} | cross_entropies(fitted, tested, vocab_size)
    return FittedNgrams(losses, counted_tokens=len(fitted), evaluated_tokens=len(tested))


def _sampled_trigrams(split: Split, vocab_size: int, limit: int) -> np.ndarray:
    """Return the keys of trigrams in a sample of at most `limit` ids, int64."""
    keys = [_trigrams(split, vocab_size, start, n) for start, n in sample(len(split), limit)]
    return np.concatenate(keys)


def _trigrams(split: Split, vocab_size: int, start: int, n: int) -> np.ndarray:
    """Return the keys of trigrams within documents in n ids from `start`; in conversations, only if they end in a target."""
    if isinstance(split, Mixture):
        keys = [np.zeros(0, np.int64)]  # the mixture may have no ids
        for part in split.parts(start, n):
            keys.append(_trigrams(split.sources[part.source], vocab_size, part.start, part.length))
        return np.concatenate(keys)

    ids = split.take(start, n)
    keys_of_ids = trigrams(ids, vocab_size)
    if isinstance(split, Packed):
        if split.is_target is not None:
            last = np.arange(start + 2, start + n)  # position of the last token of each trigram
            return keys_of_ids[split.is_target[last] & _is_in_one_conversation(split, last)]
        split = split.tokens  # packing does not change the ids
    if isinstance(split, Tokens):
        is_end = np.isin(ids, split.end_ids)
        return keys_of_ids[~(is_end[:-2] | is_end[1:-1])]
    return keys_of_ids


def _is_in_one_conversation(split: Packed, last: np.ndarray) -> np.ndarray:
    """Return whether the trigrams that end at these positions begin no earlier than their conversation, bool."""
    is_first = np.isin(last, split.begins)
    is_second = np.isin(last - 1, split.begins)
    return ~(is_first | is_second)
