"""Baselines of a loss: cross entropies of n-gram models fitted on the training data, and the compressed size of the text."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict, cast

import numpy as np

from jaxgpt.data import Data, Mixture, Packed, Split, Tokens
from jaxgpt.directories import BASELINES
from jaxgpt.errors import UserError
from jaxgpt.files import read_json
from jaxgpt.report.ngrams import MAX_BASE, cross_entropies, trigrams

COUNTED = 1 << 23  # maximum number of training tokens for n-gram counts; needs 0.7 GB of memory
EVALUATED = 1 << 22  # maximum number of held-out tokens for cross entropies
QUICK = 1 << 22  # maximum number of tokens per split when a run starts, to save time
SAMPLED = 1 << 20  # tokens per block of a sample
COMPRESSED = 1 << 20  # maximum bytes of held-out text to compress
DECODED = 1 << 18  # tokens to decode at a time


class Baselines(TypedDict):
    """The baselines of a run's loss, as in its baselines.json. A run without this file has only empty losses."""

    losses: dict[str, float]  # as in `FittedNgrams`
    counted_tokens: NotRequired[int]
    evaluated_tokens: NotRequired[int]
    bytes_per_token: NotRequired[float]  # 0: unknown
    data: NotRequired[str]  # fingerprint of the data


def baselines(data: Data) -> Baselines | None:
    """Compute the baselines of a run's loss in one or two seconds, on at most `QUICK` tokens of each split.

    Returns None for conversations, pairs and prompts, too little data or a vocabulary above `MAX_BASE`.
    """
    size = data.tokenizer.vocab_size
    if any(part.is_examples for part in data.parts or (data,)) or size > MAX_BASE:
        return None
    fitted = fit_ngrams(data.train, data.val, size, QUICK, QUICK)
    if fitted is None:
        return None
    return {
        "losses": fitted.losses,
        "counted_tokens": fitted.counted_tokens,
        "evaluated_tokens": fitted.evaluated_tokens,
        "bytes_per_token": bytes_per_token(data, QUICK),
        "data": data.fingerprint,
    }


def read_baselines(run: Path) -> Baselines:
    """Read a run's baselines.json, the result of `baselines`; without the file, return empty `losses`.

    Raises:
        UserError: if baselines.json is damaged.
    """
    path = run / BASELINES
    stored = read_json(path) if path.exists() else {}
    found = cast(Baselines, {"losses": {}} | stored)
    losses = found["losses"]
    if not isinstance(losses, dict) or not all(isinstance(loss, float) for loss in losses.values()):
        raise UserError(f"{path} is damaged: delete it; resuming the run computes it again")
    return found


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


def bytes_per_token(data: Data, limit: int = 1 << 62) -> float:
    """Return bytes per validation token, computed on up to `limit` tokens per source.

    The result is 0 (unknown) for conversations, pairs, prompts, tokenizers of words, and text with the unknown token.
    """
    if data.parts:
        parts = [part for part in data.val_parts if part.held_out or not data.held_out]
        ratios = [bytes_per_token(part, limit) for part in parts]
        if not all(ratios):
            return 0.0
        sizes = [len(part.val) for part in parts]
        return float(np.average(ratios, weights=sizes))
    if data.is_examples or data.tokenizer.separator:
        return 0.0

    unknown = data.tokenizer.unknown_id
    total_bytes = 0
    total_tokens = 0
    for start, n in sample(len(data.val), limit):
        end = start + n
        for begin in range(start, end, DECODED):
            size = min(DECODED, end - begin)
            if unknown is not None and unknown in data.val.take(begin, size):
                return 0.0
            text = data.decode(data.val, begin, size)
            total_bytes += len(text.encode())
        total_tokens += n
    return total_bytes / total_tokens


def compressed_bits(data: Data) -> float:
    """Compress the first `COMPRESSED` bytes of validation text (DEFLATE, level 9); return bits per byte."""
    text = data.decode(data.val, 0, COMPRESSED).encode()[:COMPRESSED]
    compressed = zlib.compress(text, 9, wbits=-15)
    return 8 * len(compressed) / len(text)


def sample(length: int, limit: int) -> list[tuple[int, int]]:
    """Return start and length of evenly spaced blocks that cover at most `limit` of `length` tokens."""
    if length <= limit:
        return [(0, length)]
    starts = np.linspace(0, length - SAMPLED, limit // SAMPLED)
    return [(int(start), SAMPLED) for start in starts]


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
