"""Describe data: sizes, documents, duplicates, overlap of the splits, and baselines of the loss."""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np

from jaxgpt.data import Data, Packed, Split, Tokens
from jaxgpt.data.text import Text
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.report.baselines import COUNTED, EVALUATED, bytes_per_token, compressed_bits, fit_ngrams, sample
from jaxgpt.report.hashes import GRAM, Grams, blocks, overlap

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
    lines: int | None  # None for other data than text
    duplicate_lines: int | None
    overlap: (
        float | None
    )  # fraction of the validation n-grams in the training tokens; None: too few tokens are held out
    counted_tokens: int  # as in `FittedNgrams`
    evaluated_tokens: int
    baselines: dict[str, Baseline]


class Copies(NamedTuple):
    """The number of items, and of duplicates among them; None: unknown."""

    total: int | None = None
    duplicates: int | None = None


def describe(data: Data, progress: Progress = NO_PROGRESS) -> TextDescription:
    """Describe data that is not a mixture.

    Reads all ids several times. N-gram models are fitted on at most `COUNTED` training tokens. They are evaluated on at most
    `EVALUATED` held-out tokens or, if no tokens are held out, on training tokens.

    Args:
        data: opened data of one source.
        progress: called in each of several passes with the number of tokens processed so far and the total.

    Raises:
        UserError: if an id is outside the vocabulary, the vocabulary is above `baselines.MAX_BASE`, or tokens are too few.
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
    documents = _copies(_document_hashes(data, splits))
    lines = _copies(_line_hashes(data.text) if data.text else None)

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
    """Return whether each id of the vocabulary occurs."""
    used = np.zeros(vocab_size, bool)
    for split in splits:
        for ids in blocks(split, READ, progress):
            used[ids] = True
    return used


def _baselines(data: Data, losses: Mapping[str, float], ratio: float) -> dict[str, Baseline]:
    """Return the losses of n-gram models and, if the bytes per token are known, of gzip; `ratio`: bytes per token, or 0."""
    baselines: dict[str, Baseline] = {}
    for name, loss in losses.items():
        bits = loss / math.log(2) / ratio if ratio else None
        baselines[name] = {"loss": loss, "bits_per_byte": bits}
    if ratio:
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


def _document_hashes(data: Data, splits: list[Split]) -> np.ndarray | None:
    """Return hashes of conversations, documents or files; None: unknown boundaries."""
    bounds = [_document_bounds(split, data.tokenizer.end_ids) for split in splits]
    has_ends = data.is_conversations or any(len(begins) > 1 for begins, _ in bounds)
    if has_ends:
        return _hashes_of_ids(splits, bounds)
    if data.text:
        return _hashes_of_files(data.text)
    return None


def _document_bounds(split: Split, end_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position of each document of a split, and the position after its end; equal for an empty document."""
    if isinstance(split, Packed):
        return split.begins, split.begins + split.lengths + 1
    assert isinstance(split, Tokens)
    with_ends = Tokens(split.parts, end_ids=end_ids)
    end_tokens = np.concatenate([np.zeros(0, int), *with_ends.ends()])
    return np.append(0, end_tokens + 1), np.append(end_tokens, len(split))


def _hashes_of_ids(splits: list[Split], bounds: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the hash of the ids of each non-empty document."""
    hashes = array("q")
    for split, (begins, ends) in zip(splits, bounds, strict=True):
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin < end:
                ids = split.take(begin, end - begin)
                hashes.append(hash(ids.tobytes()))
    return np.frombuffer(hashes, np.int64)


def _hashes_of_files(text: Text) -> np.ndarray:
    """Return the hash of each file of a text."""
    file = io.BytesIO(text.data)
    sizes = [size for _, size in text.files] or [-1]
    hashes = array("q", (hash(file.read(size)) for size in sizes))
    return np.frombuffer(hashes, np.int64)


def _line_hashes(text: Text) -> np.ndarray:
    """Return the hash of each non-blank line, without surrounding whitespace."""
    lines = map(bytes.strip, io.BytesIO(text.data))
    hashes = array("q", (hash(line) for line in lines if line))
    return np.frombuffer(hashes, np.int64)


def _copies(hashes: np.ndarray | None) -> Copies:
    """Count the items with these hashes, and the duplicates among them; None: unknown."""
    if hashes is None:
        return Copies()
    return Copies(len(hashes), len(hashes) - len(np.unique(hashes)))
