"""Tokenize documents to shards of ids, on all cores and in bounded memory.

Documents are a numbered sequence of pieces (`documents.Piece`). index.json records the number of pieces written, and the
length of each shard at that moment. A killed command shortens the shards to these lengths and continues with the next piece,
so its bytes equal the bytes of an uninterrupted command.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import PrepareParams
from jaxgpt.data.cuts import GPT2_CUTS, cut
from jaxgpt.data.documents import HUB, Piece, Source, check_cuts, list_sources, read_pieces, sample_text
from jaxgpt.data.fast import fast_encoder
from jaxgpt.data.shards import (
    INDEX,
    KIND,
    SPLITS,
    VERSION,
    ShardWriter,
    check_files,
    read_index,
    same_ids,
    save_tokenizer,
    saved_tokenizer,
    token_dtype,
    write_index,
)
from jaxgpt.data.tokenizer import Tokenizer, cuts_of
from jaxgpt.data.tokenizer_files import TOKENIZERS, make_tokenizer, train_bpe
from jaxgpt.errors import UserError, reported
from jaxgpt.files import LOCK, sole_writer
from jaxgpt.runtime import cores
from jaxgpt.settings import check_text

BPE_SAMPLE = 200_000_000  # bytes of text to train a BPE tokenizer on
BATCH = 1 << 20  # bytes of documents that a thread encodes at a time
BATCH_PIECES = 1 << 14  # documents that a thread encodes at a time
SAVE_EVERY = 30.0  # seconds between writes of index.json while no shard is complete
SKIPPED = 10  # skipped documents to name in the index
ANY_VALUE = ("workers", "on_error")  # parameters that the bytes do not depend on


class Encoded(NamedTuple):
    """The ids of a piece."""

    ids: bytes  # in the type of the shards
    split: str  # train or val
    size: int  # bytes of text
    first: bool  # whether a document starts with this piece
    read: int  # bytes of the sources read from disk so far
    skipped: str = ""  # why the document cannot be read; empty: it can


def prepare(
    names: Sequence[str],
    out: Path,
    params: PrepareParams,
    report: Callable[[Mapping[str, Any], int, int], None] = lambda index, read, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokenize documents to shards of ids with an index.

    If the command is killed, a call with the same arguments continues and gives the same bytes, with any number of workers.
    A call for a complete directory compares the files with their checksums.

    Args:
        names: files, directories, or names of Hugging Face datasets after `hf:`.
        out: directory to write; new, empty, or from an earlier call with the same parameters.
        params: parameters of the shards.
        report: called with the index, and the bytes of the sources read so far and in total; 0: unknown.
        note: called with messages.

    Returns:
        The content of index.json.

    Raises:
        UserError: if the sources, parameters or directory cannot be used, or a document cannot be read.
    """
    sources = _open_sources(names, out, params)
    given = None if params.tokenizer == "bpe" else _named_tokenizer(params.tokenizer)
    vocab_size = given.vocab_size if given else params.vocab_size
    if params.format == "nanogpt" and token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")
    with reported(f"cannot write to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        others = {path.name for path in out.iterdir()} - {LOCK, f"{INDEX}.tmp"}
    if others and read_index(out) is None:
        raise UserError(f"{out} is not empty and was not written by jaxgpt data prepare: choose another --out")
    with sole_writer(out):
        index = _begin(out, params, sources)
        if index["complete"]:
            check_files(out, index, checksums=True)
            note(f"{out} is complete, and its files match the checksums in {INDEX}")
            return index
        tokenizer = _tokenizer(out, index, given, params, sources)
        if index["pieces"]:
            note(f"continuing {out} after {sum(index['splits'][split]['documents'] for split in SPLITS):,} documents")
        total = sum(source.size for source in sources) if all(source.size for source in sources) else 0
        pieces = islice(read_pieces(sources, params.field, cuts_of(tokenizer)), index["pieces"], None)
        encoded = _in_order(_encoder(tokenizer, params), _batches(pieces), params.workers or cores())
        try:
            with closing(_Output(out, index)) as output, closing(encoded):
                for batch in encoded:
                    for piece in batch:
                        if piece.skipped and params.on_error == "fail":
                            raise UserError(f"{piece.skipped}; to skip such documents, use --on-error skip")
                        output.add(piece)
                    report(index, batch[-1].read, total)
                output.finish()
        except OSError as e:  # a full disk
            raise OSError(e.errno, e.strerror, e.filename or str(out)) from None
        return index


class _Output:
    """The shards of both splits, and the index."""

    def __init__(self, out: Path, index: dict[str, Any]) -> None:
        self._out, self._index, self._saved = out, index, time.monotonic()
        self._splits = {split: ShardWriter(out, index, split) for split in SPLITS}

    def add(self, encoded: Encoded) -> None:
        index, split = self._index, self._splits[encoded.split]
        is_complete = split.write(encoded.ids)
        index["pieces"] += 1
        if encoded.skipped:
            index["skipped"]["documents"] += 1
            index["skipped"]["first"] += [encoded.skipped] * (len(index["skipped"]["first"]) < SKIPPED)
        else:
            split.entry["documents"] += encoded.first
            split.entry["bytes"] += encoded.size
        if is_complete or time.monotonic() - self._saved > SAVE_EVERY:
            for each in self._splits.values():
                each.sync()
            write_index(self._out, index)
            self._saved = time.monotonic()

    def finish(self) -> None:
        """Complete the last shards and the index.

        Raises:
            UserError: if there are no training documents.
        """
        val, skipped = self._splits["val"].entry["documents"], self._index["skipped"]["documents"]
        if not self._splits["train"].entry["documents"]:
            raise UserError(
                f"no documents for training ({skipped:,} skipped, {val:,} for validation): use other sources"
                + ", or a lower --val-fraction" * (val > 0)
            )
        for split in self._splits.values():
            split.finish()
        self._index["complete"] = True
        write_index(self._out, self._index)

    def close(self) -> None:
        for split in self._splits.values():
            with suppress(OSError):  # on a full disk, closing fails too
                split.close()


def _open_sources(names: Sequence[str], out: Path, params: PrepareParams) -> list[Source]:
    """List the sources; raise `UserError` for an empty list, and if `out` is inside a source."""
    if not names:
        raise UserError("no sources: pass files, directories or datasets")
    for name in names:
        check_text("the source", name)
        if not name.startswith(HUB) and Path(name).resolve() in [out.resolve(), *out.resolve().parents]:
            raise UserError(f"--out {out} is inside the source {name}: choose another --out")
    return list_sources(names, params.subset, params.split)


def _named_tokenizer(name: str) -> Tokenizer:
    if name in TOKENIZERS and name not in ("gpt2", "byte") and not Path(name).exists():
        raise UserError(f"--tokenizer {name} is not supported: use gpt2, bpe, or the path of a tokenizer or run")
    tokenizer = make_tokenizer(name)
    if tokenizer.eos_id is None:
        raise UserError(f"the tokenizer {name} has no end-of-text token to separate documents: use gpt2 or bpe")
    return tokenizer


def _begin(out: Path, params: PrepareParams, sources: Sequence[Source]) -> dict[str, Any]:
    """Read the index, or create it. Nothing is lost if parameters change before the first document is recorded.

    Raises:
        UserError: if the directory has documents from other parameters or sources.
    """
    settings = {name: value for name, value in asdict(params).items() if name not in ANY_VALUE}
    new: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "complete": False,
        "format": params.format,
        "end_of_text": "before" if params.format == "llm.c" else "after",
        "settings": settings | {"sources": " ".join(source.name for source in sources)},
        "sources": [source._asdict() | {"files": len(source.files)} for source in sources],
        "pieces": 0,
        "skipped": {"documents": 0, "first": []},
        "splits": {split: {"documents": 0, "tokens": 0, "bytes": 0, "shards": []} for split in SPLITS},
    }
    index = read_index(out)
    if index is None or (not index["pieces"] and any(index[key] != new[key] for key in ("settings", "sources"))):
        for path in [*out.glob("*.bin"), *out.glob("*.part")]:
            path.unlink()
        write_index(out, new)
        return new
    for key, value in new["settings"].items():
        if (was := index["settings"].get(key)) != value:
            flag = "the sources" if key == "sources" else f"--{key.replace('_', '-')}"
            raise UserError(f"{out} was created with {flag} {was}, not {value}: use {was}, or another --out")
    for before, now in zip(index["sources"], new["sources"], strict=True):
        if before != now:
            raise UserError(f"{now['name']} has changed since {out} was created: choose another --out")
    return index


def _tokenizer(
    out: Path, index: dict[str, Any], given: Tokenizer | None, params: PrepareParams, sources: Sequence[Source]
) -> Tokenizer:
    """Return the tokenizer of the directory; create it if the directory is new."""
    if "tokenizer" not in index:
        skip = params.on_error == "skip"
        tokenizer = given or train_bpe(
            sample_text(sources, params.field, GPT2_CUTS, BPE_SAMPLE, skip), params.vocab_size
        )
        entry = {"name": params.tokenizer} | save_tokenizer(out, tokenizer)
        index |= {"dtype": token_dtype(tokenizer.vocab_size).name, "tokenizer": entry}
        write_index(out, index)
    tokenizer = saved_tokenizer(out, index)
    if given and not (same_ids(given, tokenizer) and given.eos_id == tokenizer.eos_id):
        raise UserError(f"--tokenizer {params.tokenizer} has changed since {out} was created: choose another --out")
    return tokenizer


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces to about `BATCH` bytes."""
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.content) if isinstance(piece.content, str | bytes) else 0
        if size >= BATCH or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(
    encode: Callable[[Sequence[Piece]], list[Encoded]], batches: Iterator[list[Piece]], workers: int
) -> Generator[list[Encoded]]:
    """Encode batches in threads, which work a few batches ahead. The results are in the order of the batches."""
    waiting = deque["Future[list[Encoded]]"]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _encoder(tokenizer: Tokenizer, params: PrepareParams) -> Callable[[Sequence[Piece]], list[Encoded]]:
    """Return a function that encodes pieces, and chooses the split of each document.

    A document is for validation if the first 64 bits of its SHA-256 are below `val_fraction`. The function runs in threads:
    both libraries release Python's lock while they encode.
    """
    encode, cuts = fast_encoder(tokenizer) or tokenizer.encode, cuts_of(tokenizer)
    end = np.array([tokenizer.eos_id], token_dtype(tokenizer.vocab_size))
    val_below = int(params.val_fraction * 2.0**64)

    def encoded(piece: Piece) -> Encoded:
        try:
            text = piece.text()
            parts = cut(text, cuts)
            check_cuts(piece.where, parts)
            try:
                ids = [encode(part) for part in parts]
            except UserError as e:
                raise UserError(f"{piece.where}: {e}") from None
        except UserError as e:
            if not (piece.first and piece.last):
                raise  # the beginning of the document may be written
            return Encoded(b"", "train", 0, True, piece.read, str(e))
        data = text.encode()
        before = piece.first and params.format == "llm.c"
        after = piece.last and params.format == "nanogpt"
        ids = [end] * before + ids + [end] * after
        digest = piece.digest or hashlib.sha256(data).digest()
        split = "val" if int.from_bytes(digest[:8], "big") < val_below else "train"
        joined = np.concatenate(ids, dtype=end.dtype, casting="unsafe").tobytes()
        return Encoded(joined, split, len(data), piece.first, piece.read)

    return lambda pieces: [encoded(piece) for piece in pieces]
