"""Describe data: sizes, documents, duplicates, overlap of the splits, and baselines of the loss."""

from __future__ import annotations

import heapq
import io
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import MAX_VOCAB, Config, DataConfig
from jaxgpt.data import Data, Packed, Split, Tokenizer, Tokens, open_data
from jaxgpt.data.shards import complete_index
from jaxgpt.data.text import Progress, Text, no_progress
from jaxgpt.data.tokenizer import WordTokenizer
from jaxgpt.data.tokenizer_files import FROM_TEXT
from jaxgpt.data.tokens import is_token_path
from jaxgpt.errors import UserError
from jaxgpt.report.baselines import COUNTED, EVALUATED, compressed_sizes, cross_entropies, sample
from jaxgpt.report.hashes import GRAM, count_duplicates, document_hashes, gram_hashes, overlap

READ = 1 << 20  # tokens to process at once
LINES_SHOWN = 3  # longest lines


class UnknownTokenizer(WordTokenizer):
    """A tokenizer for token files without one: any id is valid, none ends a document."""

    vocab_size = MAX_VOCAB


def open_reported(config: Config, tokenizer: Tokenizer | None = None, progress: Progress = no_progress) -> Data:
    """Open data as for training, except that token files need no tokenizer; args as for `open_data`."""
    data = config.data
    sources = [each for each, _ in data.sources]
    if tokenizer is None and data.tokenizer in (*FROM_TEXT, "ids") and all(map(_lacks_tokenizer, sources)):
        tokenizer = UnknownTokenizer([])
    size = config.model.vocab_size if data.tokenizer == "ids" and tokenizer is None else 0
    return open_data(config.with_model(vocab_size=size), tokenizer, progress)


def _lacks_tokenizer(data: DataConfig) -> bool:
    path = Path(data.path)
    return bool(data.path) and not data.conversations and is_token_path(path) and complete_index(path) is None


def report_on(data: Data, progress: Progress = no_progress) -> dict[str, Any]:
    """Describe data that is not a mixture.

    Reads all ids twice, in blocks. N-grams are counted in at most `COUNTED` training tokens, and evaluated on at most
    `EVALUATED` held-out tokens, or on training tokens if nothing is held out.

    Args:
        data: the data.
        progress: called with the number of tokens processed so far and the total.

    Returns:
        A dictionary for JSON. Values that the data does not define are None: bytes of conversations and word tokenizers,
        documents of token files without a tokenizer, lines of data that is not text, the overlap if nothing is held out.

    Raises:
        UserError: if an id is outside the vocabulary, or there are too few tokens.
    """
    train, val = _plain(data.train), _plain(data.val)
    splits = [train, val] if data.held_out else [train]
    known = not isinstance(data.tokenizer, UnknownTokenizer)
    tokens = sum(map(len, splits))
    read = _Reader(tokens + len(train), progress)
    used = np.zeros(data.tokenizer.vocab_size if known else 0, bool)
    has_ends = False

    def observed() -> Iterator[np.ndarray]:
        nonlocal used, has_ends
        for ids in read.blocks(*splits):
            used = np.pad(used, (0, max(int(ids.max()) + 1 - len(used), 0)))
            used[ids] = True
            has_ends = has_ends or bool(np.isin(ids, data.tokenizer.end_ids).any())
            yield ids

    documents = document_hashes(observed(), data.tokenizer.end_ids)
    if data.is_conversations:
        documents = np.array([hash(part) for split in splits for part in _conversations(split)], np.int64)
    elif data.text and not has_ends:
        documents = np.array([hash(part) for _, part in _files(data.text)], np.int64)
    results = cross_entropies(train, val, np.cumsum(used) - 1, len(used), COUNTED, EVALUATED)
    if results is None:
        raise UserError(
            f"{data.source}: {len(train):,} training and {len(val) * data.held_out:,} validation tokens are too few to compute "
            f"the entropy of trigrams: use a longer text, or change data.train_fraction"
        )
    losses, counted, evaluated = results
    ratio = _bytes_per_token(data, val)
    baselines = {
        name: {"loss": loss, "bits_per_byte": loss / math.log(2) / ratio if ratio else None}
        for name, loss in losses.items()
    }
    for name, bits in (compressed_sizes(data) if ratio else {}).items():
        baselines[name] = {"loss": bits * math.log(2) * ratio, "bits_per_byte": bits}
    grams = _held_out_grams(val) if data.held_out else np.zeros(0, np.uint64)
    shared = overlap(grams, map(gram_hashes, read.blocks(train, more=GRAM - 1))) if len(grams) else None
    files = _file_sizes(data, splits)
    size = sum(files.values())
    return {
        "source": data.source,
        "train_tokens": len(train),
        "validation_tokens": len(val) if data.held_out else 0,
        "bytes_per_token": (size / tokens if data.text else ratio) or None,
        "tokenizer": known,
        "vocabulary": len(used),
        "vocabulary_used": int(used.sum()),
        "documents": len(documents) if known else None,
        "duplicate_documents": count_duplicates(documents) if known else None,
        **_lines(data.text),
        "files": [{"name": name, "share": n / size} for name, n in files.items()],
        "overlap": shared,
        "counted_tokens": counted,
        "evaluated_tokens": evaluated,
        "baselines": baselines,
    }


class _Reader:
    """Read splits in blocks, and report the progress over all of them."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.progress, self.done = total, progress, 0

    def blocks(self, *splits: Split, more: int = 0) -> Iterator[np.ndarray]:
        """Yield blocks of `READ` ids, and `more` ids after each."""
        for split in splits:
            for start in range(0, len(split), READ):
                n = min(READ, len(split) - start)
                yield split.take(start, min(n + more, len(split) - start))
                self.done += n
                self.progress(self.done, self.total)


def _plain(split: Split) -> Split:
    """Return the ids of packed documents in their own order."""
    return split.tokens if isinstance(split, Packed) and split.is_target is None else split


def _conversations(split: Split) -> Iterator[bytes]:
    assert isinstance(split, Packed)
    for begin, n in zip(split.begins.tolist(), split.lengths.tolist(), strict=True):
        yield split.take(begin, n + 1).tobytes()


def _held_out_grams(val: Split) -> np.ndarray:
    """Return the hashes of the validation n-grams; conversations: only n-grams that end in a target."""
    parts = []
    for start, n in sample(len(val), EVALUATED):
        hashes = gram_hashes(val.take(start, n))
        if isinstance(val, Packed) and val.is_target is not None:
            hashes = hashes[val.is_target[start : start + n][GRAM - 1 :]]
        parts.append(hashes)
    return np.concatenate(parts)


def _bytes_per_token(data: Data, val: Split) -> float:
    """Return the bytes of text per held-out token; 0 if decoding does not restore the text."""
    if not data.restores_text:
        return 0.0
    blocks = sample(len(val), EVALUATED)
    return sum(len(data.decode(val, *block).encode()) for block in blocks) / sum(n for _, n in blocks)


def _file_sizes(data: Data, splits: list[Split]) -> dict[str, int]:
    """Return the size of each file in bytes of text, or in ids."""
    if data.text:
        return dict(data.text.files) or {data.source: len(data.text.data)}
    sizes = dict[str, int]()
    for split in splits:
        for part in split.parts if isinstance(split, Tokens) else [split]:
            name = str(getattr(part, "filename", data.name))
            sizes[name] = sizes.get(name, 0) + len(part)
    return {name if data.is_conversations else Path(name).name: size for name, size in sizes.items()}


def _files(text: Text) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a text."""
    begin = 0
    for name, size in text.files or [("", len(text.data))]:
        yield name, bytes(text.data[begin : begin + size])
        begin += size


def _lines(text: Text | None) -> dict[str, Any]:
    """Count the non-blank lines and their duplicates, and find the longest."""
    if text is None:
        return {"lines": None, "duplicate_lines": None, "longest_lines": None}
    hashes, longest = array("q"), list[tuple[int, int, str]]()
    for name, part in _files(text):
        for number, line in enumerate(io.BytesIO(part), 1):
            if content := line.strip():
                hashes.append(hash(content))
                longest.append((len(line.removesuffix(b"\n")), -number, name))
            if len(longest) > 1 << 12:
                longest = heapq.nlargest(LINES_SHOWN, longest)
    return {
        "lines": len(hashes),
        "duplicate_lines": count_duplicates(np.frombuffer(hashes, np.int64)),
        "longest_lines": [
            {"bytes": size, "line": -number} | ({"file": name} if name else {})
            for size, number, name in heapq.nlargest(LINES_SHOWN, longest)
        ],
    }
