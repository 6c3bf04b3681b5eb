"""Describe data: sizes, documents, duplicates, overlap of the splits, and baselines of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from jaxgpt.data import Data, Packed, Split
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.report.blocks import blocks, sample
from jaxgpt.report.duplicates import document_copies, line_copies
from jaxgpt.report.fitted_ngrams import fit_ngrams
from jaxgpt.report.hashes import GRAM, Grams, overlap
from jaxgpt.report.text_bytes import bytes_per_token, compressed_bits

COUNTED = 1 << 23  # maximum number of training tokens for n-gram counts; needs 0.7 GB of memory
EVALUATED = 1 << 22  # maximum number of held-out tokens for cross entropies
READ = 1 << 20  # tokens to process at a time


class Baseline(TypedDict):
    """A baseline of the loss."""

    loss: float  # nats per token
    bits_per_byte: float | None  # None: the bytes per token are unknown


class TextDescription(TypedDict):
    """Description of data, for JSON.

    Documents are conversations, texts between end-of-text ids, or files. Their number is None for token files without
    end-of-text ids.
    """

    source: str
    train_tokens: int
    validation_tokens: int  # 0: no tokens are held out
    bytes_per_token: float | None  # None for conversations, word tokenizers and text with the unknown token
    vocabulary: int  # number of ids
    vocabulary_used: int  # number of ids that occur
    documents: int | None
    duplicate_documents: int | None
    lines: int | None  # None for data other than text
    duplicate_lines: int | None
    overlap: float | None  # fraction of the validation n-grams in the training tokens; None: too few held-out tokens
    counted_tokens: int  # as in `FittedNgrams`
    evaluated_tokens: int
    baselines: dict[str, Baseline]


def describe(data: Data, progress: Progress = NO_PROGRESS) -> TextDescription:
    """Describe data that is not a mixture.

    Reads all ids several times. N-gram models are fitted on at most `COUNTED` training tokens, and evaluated on at most
    `EVALUATED` held-out tokens or, if no tokens are held out, on training tokens.

    Args:
        data: opened data of one source.
        progress: called in each of several passes with the number of tokens processed so far and the total.

    Raises:
        UserError: if an id is outside the vocabulary, the vocabulary is above `ngrams.MAX_BASE`, or tokens are too few.
    """
    train = _plain(data.train)
    val = _plain(data.val)
    splits = [train, val] if data.held_out else [train]
    held_out_tokens = len(val) if data.held_out else 0
    used = _used_ids(splits, data.tokenizer.vocab_size, progress)
    fitted = fit_ngrams(train, val, len(used), COUNTED, EVALUATED)
    if fitted is None:
        raise UserError(
            f"{data.source}: {len(train):,} training and {held_out_tokens:,} validation tokens are too few to compute "
            f"the entropy of trigrams: use a longer text, or change --data.train-fraction"
        )
    ratio = bytes_per_token(data, EVALUATED)
    documents = document_copies(data, splits)
    lines = line_copies(data.text)

    # Training n-grams are hashed in blocks, and only while the overlap is computed.
    grams = _held_out_grams(val) if data.held_out else np.zeros(0, np.uint64)
    training = (Grams(ids).of(GRAM) for ids in blocks(train, READ, progress, following=GRAM - 1))
    return {
        "source": data.source,
        "train_tokens": len(train),
        "validation_tokens": held_out_tokens,
        "bytes_per_token": ratio or None,
        "vocabulary": len(used),
        "vocabulary_used": int(used.sum()),
        "documents": documents.total,
        "duplicate_documents": documents.duplicates,
        "lines": lines.total,
        "duplicate_lines": lines.duplicates,
        "overlap": overlap(grams, training) if len(grams) else None,
        "counted_tokens": fitted.counted_tokens,
        "evaluated_tokens": fitted.evaluated_tokens,
        "baselines": _baselines(data, fitted.losses, ratio),
    }


def _used_ids(splits: Sequence[Split], vocab_size: int, progress: Progress) -> np.ndarray:
    """Return a boolean mask `[vocab_size]` of the ids that occur in the splits."""
    used = np.zeros(vocab_size, bool)
    for split in splits:
        for ids in blocks(split, READ, progress):
            used[ids] = True
    return used


def _baselines(data: Data, losses: Mapping[str, float], ratio: float) -> dict[str, Baseline]:
    """Return the losses of n-gram models and, if the bytes per token are known, of gzip; `ratio`: bytes per token, or 0."""
    if not ratio:
        return {name: {"loss": loss, "bits_per_byte": None} for name, loss in losses.items()}

    baselines: dict[str, Baseline] = {}
    for name, loss in losses.items():
        baselines[name] = {"loss": loss, "bits_per_byte": loss / math.log(2) / ratio}
    bits = compressed_bits(data)
    baselines["gzip"] = {"loss": bits * math.log(2) * ratio, "bits_per_byte": bits}
    return baselines


def _plain(split: Split) -> Split:
    """Return the ids of packed documents in document order; return other splits unchanged."""
    if isinstance(split, Packed) and split.is_target is None:
        return split.tokens
    return split


def _held_out_grams(val: Split) -> np.ndarray:
    """Hash n-grams in at most `EVALUATED` validation ids (conversations: n-grams that end in a target)."""
    parts = []
    for start, n in sample(len(val), EVALUATED):
        hashes = Grams(val.take(start, n)).of(GRAM)
        if isinstance(val, Packed) and val.is_target is not None:
            is_target = val.is_target[start : start + n]
            hashes = hashes[is_target[GRAM - 1 :]]
        parts.append(hashes)
    return np.concatenate(parts)
