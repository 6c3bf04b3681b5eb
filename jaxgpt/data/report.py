"""Describe the data of a config: sizes, documents, repetitions, and the losses to compare a model with."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import MAX_VOCAB, Config, UserError
from jaxgpt.data import shared_tokenizer, statistics
from jaxgpt.data.conversations import load_conversations
from jaxgpt.data.corpus import Progress, Text, no_progress, read_text
from jaxgpt.data.encoded import count_bytes, encode_text
from jaxgpt.data.mixture import Mixture
from jaxgpt.data.packing import Packed
from jaxgpt.data.shards import holds_ids, prepared_tokenizer
from jaxgpt.data.tokenizer import Tokenizer, make_tokenizer
from jaxgpt.data.tokens import Tokens, open_splits, with_documents

BLOCK = 1 << 20  # tokens to process at once
COUNTED = 1 << 23  # training tokens to count n-grams in: up to 0.7 GB of memory
EVALUATED = 1 << 22  # held-out tokens to compute cross entropies on
QUICK = 1 << 22  # tokens to count and to evaluate when a run starts
COMPRESSED, BEFORE = 1 << 20, 1 << 21  # bytes of held-out text to compress, and of training text before it
DECODED = 1 << 18  # held-out tokens of token files to decode
LONGEST = 3  # lines
NEED_TEXT = ("char", "word", "bpe", "ids")  # tokenizers that token files do not define


@dataclass(frozen=True)
class Source:
    """Data to describe.

    Attributes:
        train: ids for training.
        val: ids for validation; empty if nothing is held out.
        tokenizer: their tokenizer; None: unknown.
        source: one-line description.
        files: name and size of each file, in bytes of text or in ids.
        text: the text; None for token files and conversations.
        val_bytes: bytes of text of the validation ids, or of the training ids if nothing is held out; 0 if unknown.
    """

    train: Tokens | Packed
    val: Tokens | Packed
    tokenizer: Tokenizer | None
    source: str
    files: Sequence[tuple[str, int]]
    text: Text | None = None
    val_bytes: int = 0

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a document."""
        return self.tokenizer.end_ids if self.tokenizer else ()


def open_sources(
    config: Config, tokenizer: Tokenizer | None = None, progress: Progress = no_progress
) -> Iterator[tuple[str, float, Source]]:
    """Yield the path of each source of a mixture, its share of the training windows, and its data; or the only source.

    Args: as for `open_source`.
    """
    data = config.data
    if not data.mix:
        yield data.path, 1.0, open_source(config, tokenizer, progress)
        return
    if tokenizer is None and not (
        data.tokenizer in NEED_TEXT and all(holds_ids(Path(p.path)) for p, _ in data.sources)
    ):
        tokenizer = shared_tokenizer(config, progress)
    total = sum(weight for _, weight in data.sources)
    for each, weight in data.sources:
        yield each.path, weight / total, open_source(replace(config, data=each), tokenizer, progress)


def open_source(config: Config, tokenizer: Tokenizer | None = None, progress: Progress = no_progress) -> Source:
    """Read, tokenize and split data as for training. Token files need no tokenizer.

    Args:
        config: config of a preset or run.
        tokenizer: an existing tokenizer, such as that of a run; None: make the one of `config.data`.
        progress: called with the number of bytes tokenized so far and the total.

    Raises:
        UserError: the data cannot be read, or its tokenizer cannot be made.
    """
    data, path, size = config.data, Path(config.data.path), config.model.vocab_size
    if data.conversations:
        if tokenizer is None and data.tokenizer in NEED_TEXT:
            raise UserError(
                f"{path} holds conversations, not text: choose their tokenizer with --data.tokenizer (gpt2 or PATH)"
            )
        tokenizer = tokenizer or make_tokenizer(data.tokenizer, "", data.vocab_size, size)
        packed, rest, source, _ = load_conversations(
            path, tokenizer, config.model.block_size, data.train_fraction, progress
        )
        return Source(packed, rest, tokenizer, source, [(str(path), len(packed) + len(rest))])
    if data.path and holds_ids(path):
        tokenizer = prepared_tokenizer(path, data.tokenizer, tokenizer) or tokenizer
        if tokenizer is None and data.tokenizer not in NEED_TEXT:
            tokenizer = make_tokenizer(data.tokenizer, "", data.vocab_size, size)
        train, val, source = open_splits(path, data.train_fraction)
        limit = tokenizer.vocab_size if tokenizer else MAX_VOCAB
        train, val = train.below(limit), val.below(limit)
        names = [str(getattr(part, "filename", path)) for part in (*train.parts, *val.parts)]
        sizes = dict.fromkeys(names, 0)
        for name, part in zip(names, (*train.parts, *val.parts), strict=True):
            sizes[name] += len(part)
        files = [(Path(name).name, n) for name, n in sizes.items()]
        return Source(*_documents(config, train, val, tokenizer), tokenizer, source, files)
    text = read_text(data)
    tokenizer = tokenizer or make_tokenizer(data.tokenizer, text, data.vocab_size, size, progress)
    encoded = encode_text(tokenizer, text, progress)
    train, val = encoded.tokens.split(int(data.train_fraction * len(encoded.tokens)))
    val_bytes = count_bytes(tokenizer, text, encoded, len(train) if len(val) else 0)
    files = list(text.files) or [(text.source, len(text.data))]
    return Source(*_documents(config, train, val, tokenizer), tokenizer, text.source, files, text, val_bytes)


def describe(source: Source, progress: Progress = no_progress) -> dict[str, Any]:
    """Describe data.

    Reads all ids twice, in blocks. N-grams are counted in at most `COUNTED` training tokens, and evaluated on at most
    `EVALUATED` held-out tokens, or on training tokens if nothing is held out.

    Args:
        source: the data.
        progress: called with the number of tokens processed so far and the total.

    Returns:
        A dictionary for JSON. Values that the data does not define are None: bytes of conversations, bytes and documents of
        token files without a tokenizer, lines of data that is not text, the overlap if nothing is held out.

    Raises:
        UserError: an id is outside the vocabulary, or there are too few tokens.
    """
    train, val = source.train, source.val
    held_out = val if len(val) else train
    total, done = 2 * len(train) + len(val), 0

    def blocks(*splits: Tokens | Packed, more: int = 0) -> Iterator[np.ndarray]:
        nonlocal done
        for split in splits:
            for start in range(0, len(split), BLOCK):
                n = min(BLOCK, len(split) - start)
                yield split.take(start, min(n + more, len(split) - start))
                done += n
                progress(done, total)

    used = np.zeros(source.tokenizer.vocab_size if source.tokenizer else 0, bool)
    ended = False

    def observed() -> Iterator[np.ndarray]:
        nonlocal used, ended
        for ids in blocks(train, val):
            used = np.pad(used, (0, max(int(ids.max()) + 1 - len(used), 0)))
            used[ids] = True
            ended = ended or bool(np.isin(ids, source.end_ids).any())
            yield ids

    hashes = statistics.document_hashes(observed(), source.end_ids)
    if isinstance(train, Packed) and isinstance(val, Packed):
        texts = [
            each.take(begin, n + 1).tobytes()
            for each in (train, val)
            for begin, n in zip(each.begins.tolist(), each.lengths.tolist(), strict=True)
        ]
        hashes = np.array([hash(text) for text in texts], np.int64)
    elif source.text and not ended:
        hashes = np.array([hash(bytes(part)) for _, part in _parts(source.text)], np.int64)
    rank, base = np.cumsum(used) - 1, int(used.sum())
    results = _entropies(train, held_out, len(used), rank, base, COUNTED, EVALUATED)
    if results is None:
        raise UserError(
            f"{source.source}: {len(train):,} training and {len(val):,} validation tokens are too few to compute the "
            f"entropy of trigrams: use a longer text, or change data.train_fraction"
        )
    losses, counted, evaluated = results
    bytes_per_token, compressed = _compressed(source)
    baselines = {
        name: {"loss": loss, "bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None}
        for name, loss in losses.items()
    }
    for name, bits in compressed.items():
        baselines[name] = {"loss": bits * math.log(2) * bytes_per_token, "bits_per_byte": bits}
    grams = _grams(val) if len(val) else np.zeros(0, np.uint64)
    shared = None
    if len(grams):
        shared = statistics.overlap(grams, map(statistics.gram_hashes, blocks(train, more=statistics.GRAM - 1)))
    size = sum(n for _, n in source.files)
    return {
        "source": source.source,
        "train_tokens": len(train),
        "validation_tokens": len(val),
        "bytes_per_token": (size / (len(train) + len(val)) if source.text else bytes_per_token) or None,
        "tokenizer": source.tokenizer is not None,
        "vocabulary": len(used),
        "vocabulary_used": base,
        "documents": None if source.tokenizer is None else len(hashes),
        "duplicate_documents": None if source.tokenizer is None else statistics.repeated(hashes),
        **_lines(source.text),
        "files": [{"name": name, "share": n / size} for name, n in source.files],
        "overlap": shared,
        "counted_tokens": counted,
        "evaluated_tokens": evaluated,
        "baselines": baselines,
    }


def baselines(
    train: Tokens | Packed | Mixture, held_out: Tokens | Packed | Mixture, vocab_size: int
) -> dict[str, Any] | None:
    """Compute the baselines of a run's loss in a few seconds, on at most `QUICK` tokens for training and for evaluation.

    Args:
        train: ids for training; of a mixture, those of all sources, whatever their weights.
        held_out: ids to compute cross entropies on.
        vocab_size: V, of the tokenizer.

    Returns:
        A dictionary for JSON: `losses` of the uniform, unigram, bigram and trigram model, in nats per token, and the number
        of tokens they were counted in and evaluated on. None for conversations, whose targets do not follow one another, and
        if there are too few tokens.
    """
    sources = train.sources if isinstance(train, Mixture) else [train]
    if (
        any(isinstance(each, Packed) and each.trained is not None for each in sources)
        or vocab_size > statistics.MAX_BASE
    ):
        return None
    results = _entropies(train, held_out, vocab_size, np.arange(vocab_size), vocab_size, QUICK, QUICK)
    return dict(zip(("losses", "counted_tokens", "evaluated_tokens"), results, strict=True)) if results else None


def _entropies(
    train: Tokens | Packed | Mixture,
    held_out: Tokens | Packed | Mixture,
    vocab_size: int,
    rank: np.ndarray,
    base: int,
    counted: int,
    evaluated: int,
) -> tuple[dict[str, float], int, int] | None:
    """Count n-grams and compute cross entropies on samples of a given size; return them and the numbers of tokens."""
    fitted = np.concatenate([_keys(train, rank, base, *place) for place in _sample(len(train), counted)])
    tested = np.concatenate([_keys(held_out, rank, base, *place) for place in _sample(len(held_out), evaluated)])
    if not len(fitted) or not len(tested):
        return None
    entropies = statistics.NGrams.fit(fitted, base, vocab_size).cross_entropies(tested)
    losses = dict(zip(("unigram", "bigram", "trigram"), entropies, strict=True))
    return {"uniform": math.log(vocab_size)} | losses, len(fitted), len(tested)


def _documents(config: Config, train: Tokens, val: Tokens, tokenizer: Tokenizer | None) -> tuple[Tokens, Tokens]:
    """With `data.documents` mask or pack, mark where documents end."""
    if config.data.documents == "flow":
        return train, val
    end_ids = tokenizer.end_ids if tokenizer else ()
    return with_documents(train, end_ids, config.data.documents), Tokens(val.parts, val.vocab_size, end_ids)


def _sample(length: int, limit: int) -> list[tuple[int, int]]:
    """Return the start and length of evenly spaced blocks with at most `limit` of `length` tokens; all of them if they fit."""
    if length <= limit:
        return [(0, length)]
    return [(int(start), BLOCK) for start in np.linspace(0, length - BLOCK, limit // BLOCK)]


def _keys(split: Tokens | Packed | Mixture, rank: np.ndarray, base: int, start: int, n: int) -> np.ndarray:
    """Return the trigrams whose last token is a target and whose tokens are of the same document."""
    if isinstance(split, Mixture):
        parts = split.parts(start, n)
        return np.concatenate([_keys(split.sources[index], rank, base, *place) for index, *place in parts])
    if isinstance(split, Packed) and split.trained is None:
        return _keys(split.tokens, rank, base, start, n)
    ids = split.take(start, n)
    keys = statistics.trigrams(rank[ids], base)
    if isinstance(split, Packed) and split.trained is not None:
        index = np.arange(start, start + n)
        begins = np.sort(split.begins)
        inside = index >= begins[np.searchsorted(begins, index, side="right") - 1] + 2
        return keys[(inside & split.trained[start : start + n])[2:]]
    if isinstance(split, Tokens) and split.end_ids:
        ends = np.isin(ids, split.end_ids)
        return keys[~(ends[:-2] | ends[1:-1])]
    return keys


def _grams(val: Tokens | Packed) -> np.ndarray:
    """Return the hashes of the validation n-grams; of conversations, those whose last token is a target."""
    parts = []
    for start, n in _sample(len(val), EVALUATED):
        hashes = statistics.gram_hashes(val.take(start, n))
        if isinstance(val, Packed) and val.trained is not None:
            hashes = hashes[val.trained[start : start + n][statistics.GRAM - 1 :]]
        parts.append(hashes)
    return np.concatenate(parts)


def _parts(text: Text) -> Iterator[tuple[str, bytes | bytearray]]:
    """Yield the name and contents of each file of a text."""
    begin = 0
    for name, size in text.files or [("", len(text.data))]:
        yield name, text.data[begin : begin + size]
        begin += size


def _lines(text: Text | None) -> dict[str, Any]:
    """Count lines that are not blank and those that equal an earlier one, and find the longest."""
    if text is None:
        return {"lines": None, "duplicate_lines": None, "longest_lines": None}
    hashes, longest = array("q"), list[tuple[int, int, str]]()
    for name, part in _parts(text):
        number, begin = 0, 0
        while begin < len(part):
            found = part.find(b"\n", begin)
            end = len(part) if found < 0 else found
            number += 1
            if line := bytes(part[begin:end]).strip():
                hashes.append(hash(line))
                longest.append((end - begin, -number, name))
            begin = end + 1
            if len(longest) > 1 << 12:
                longest = heapq.nlargest(LONGEST, longest)
    return {
        "lines": len(hashes),
        "duplicate_lines": statistics.repeated(np.frombuffer(hashes, np.int64)),
        "longest_lines": [
            {"bytes": size, "line": -number} | ({"file": name} if name else {})
            for size, number, name in heapq.nlargest(LONGEST, longest)
        ],
    }


def _compressed(source: Source) -> tuple[float, dict[str, float]]:
    """Return the bytes per held-out token (0: unknown), and the bits per byte of the held-out text by compressor.

    The compressors have seen the end of the training text before.
    """
    if source.text:
        data, n = source.text.data, source.val_bytes
        begin = len(data) - n
        before, text = bytes(data[max(begin - BEFORE, 0) : begin]), bytes(data[begin : begin + COMPRESSED])
        per_token = n / len(source.val if len(source.val) else source.train)
    elif source.tokenizer and not source.tokenizer.separator and isinstance(source.train, Tokens):
        held_out = source.val if len(source.val) else source.train
        ids = held_out.take(0, min(len(held_out), DECODED))
        text = source.tokenizer.decode(ids[~np.isin(ids, source.end_ids)]).encode()
        last = source.train.take(max(len(source.train) - 2 * DECODED, 0), min(len(source.train), 2 * DECODED))
        known = len(source.val) > 0
        before = source.tokenizer.decode(last[~np.isin(last, source.end_ids)]).encode()[-BEFORE:] if known else b""
        per_token = len(text) / len(ids)
        text = text[:COMPRESSED]
    else:
        return 0.0, {}
    if not text:
        return 0.0, {}
    return per_token, {"gzip": statistics.gzip_bits(text, before), "xz": statistics.xz_bits(text, before)}
