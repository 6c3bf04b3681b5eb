"""Tokenize documents to shards of ids, in several processes and bounded memory.

Documents are a numbered sequence of pieces (`documents.Piece`). index.json records the number of pieces written, and the
length of each shard at that moment. A killed command shortens the shards to these lengths and continues with the next piece,
so its bytes equal the bytes of an uninterrupted command.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.config import MAX_VOCAB
from jaxgpt.data.cuts import GPT2_CUTS, cut
from jaxgpt.data.documents import HUB, Piece, Source, check_cuts, list_sources, read_pieces, sample_text
from jaxgpt.data.fast import fast_encoder
from jaxgpt.data.shards import (
    INDEX,
    KIND,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    Format,
    Prepared,
    ShardWriter,
    read_index,
    same_ids,
    save_tokenizer,
    token_dtype,
    write_index,
)
from jaxgpt.data.tokenizer import Tokenizer, cuts_of
from jaxgpt.data.tokenizer_files import TOKENIZERS, load_tokenizer, make_tokenizer, train_bpe
from jaxgpt.errors import TrainingFailed, UserError, as_float, as_int, reported, short_repr
from jaxgpt.files import LOCK, sole_writer
from jaxgpt.runtime import cores

BPE_SAMPLE = 200_000_000  # bytes of text to train a BPE tokenizer on
BATCH = 1 << 20  # bytes of documents that a worker receives at a time
BATCH_PIECES = 1 << 14  # documents that a worker receives at a time
SAVE_EVERY = 30.0  # seconds between writes of index.json while no shard is complete
SMALL = 4 << 20  # bytes of sources below which starting processes takes longer than encoding
SKIPPED = 10  # skipped documents to name in the index
SHARD_TOKENS = 2**31 - 1  # maximum, because the header of llm.c has 32 bits for it


@dataclass(frozen=True)
class Settings:
    """Settings that determine the shards, besides the sources."""

    tokenizer: str = "gpt2"  # gpt2, bpe (trained on the sources), or the path of a tokenizer or run
    vocab_size: int = 32768  # maximum vocabulary size of bpe
    format: Format = "llm.c"  # format of the shards
    shard_tokens: int = 100_000_000  # ids in a shard of llm.c's format
    val_fraction: float = 0.005  # fraction of the documents for validation
    field: str = "text"  # field or column with the text, in JSON, Parquet and datasets
    subset: str = ""  # subset of a Hugging Face dataset; empty: the default subset
    split: str = "train"  # split of a Hugging Face dataset

    def __post_init__(self) -> None:
        as_int("--shard-tokens", self.shard_tokens, 1, SHARD_TOKENS)
        as_float("--val-fraction", self.val_fraction, 0.0, 1.0, open_end=True)
        as_int("--vocab-size", self.vocab_size, 257, MAX_VOCAB)


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
    settings: Settings,
    workers: int = 0,
    on_error: Literal["fail", "skip"] = "fail",
    report: Callable[[Mapping[str, Any], int, int], None] = lambda index, read, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokenize documents to shards of ids with an index.

    If the command is killed, a call with the same arguments continues and gives the same bytes, with any number of workers.
    A call for a complete directory compares the files with their checksums.

    Args:
        names: files, directories, or names of Hugging Face datasets after `hf:`.
        out: directory to write; new, empty, or from an earlier call with the same settings.
        settings: settings of the shards.
        workers: number of processes; 0: one for each core.
        on_error: for a document that cannot be read: raise an error, or count it and continue.
        report: called with the index, and the bytes of the sources read so far and in total; 0: unknown.
        note: called with messages.

    Returns:
        The content of index.json.

    Raises:
        UserError: if the sources, settings or directory cannot be used, or a document cannot be read.
        TrainingFailed: if a worker process was killed.
    """
    as_int("--workers", workers, 0, 4096)
    _check_names(names, out, settings)
    sources = list_sources(names, settings.subset, settings.split)
    given = None if settings.tokenizer == "bpe" else _named_tokenizer(settings.tokenizer)
    vocab_size = given.vocab_size if given else settings.vocab_size
    if settings.format == "nanogpt" and token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")
    _create(out)
    with sole_writer(out):
        index = _begin(out, settings, sources)
        if index["complete"]:
            Prepared(out, index).check(checksums=True)
            note(f"{out} is complete, and its files match the checksums in {INDEX}")
            return index
        tokenizer = _tokenizer(out, index, given, settings, sources, on_error == "skip")
        if index["pieces"]:
            note(f"continuing {out} after {sum(index['splits'][split]['documents'] for split in SPLITS):,} documents")
        total = sum(source.size for source in sources) if all(source.size for source in sources) else 0
        workers = workers or (1 if 0 < total < SMALL else cores())
        pieces = islice(read_pieces(sources, settings.field, cuts_of(tokenizer)), index["pieces"], None)
        try:
            with closing(_Output(out, index)) as output, closing(_encoded(pieces, workers, out, settings)) as batches:
                for batch in batches:
                    for encoded in batch:
                        if encoded.skipped and on_error == "fail":
                            raise UserError(f"{encoded.skipped}; to skip such documents, use --on-error skip")
                        output.add(encoded)
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
            self._save()

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

    def _save(self) -> None:
        for split in self._splits.values():
            split.sync()
        write_index(self._out, self._index)
        self._saved = time.monotonic()


def _check_names(names: Sequence[str], out: Path, settings: Settings) -> None:
    """Raise `UserError` if there are no sources, if a name is not UTF-8, or if `out` is inside a source."""
    if not names:
        raise UserError("no sources: pass files, directories or datasets")
    for name in [*names, *(value for value in asdict(settings).values() if isinstance(value, str))]:
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise UserError(f"the name {short_repr(name)} is not UTF-8: rename it")
    for name in names:
        if not name.startswith(HUB) and Path(name).resolve() in [out.resolve(), *out.resolve().parents]:
            raise UserError(f"--out {out} is inside the source {name}: choose another --out")


def _named_tokenizer(name: str) -> Tokenizer:
    if name in TOKENIZERS and name not in ("gpt2", "byte") and not Path(name).exists():
        raise UserError(f"--tokenizer {name} is not supported: use gpt2, bpe, or the path of a tokenizer or run")
    tokenizer = make_tokenizer(name, "", 0, 0)
    if tokenizer.eos_id is None:
        raise UserError(f"the tokenizer {name} has no end-of-text token to separate documents: use gpt2 or bpe")
    return tokenizer


def _create(out: Path) -> None:
    with reported(f"cannot write to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in out.iterdir()} - {LOCK, f"{INDEX}.tmp"}
    if names and read_index(out) is None:
        raise UserError(f"{out} is not empty and was not written by jaxgpt data prepare: choose another --out")


def _begin(out: Path, settings: Settings, sources: Sequence[Source]) -> dict[str, Any]:
    """Read the index, or create it. Nothing is lost if settings change before the first document is recorded.

    Raises:
        UserError: if the directory has documents from other settings or sources.
    """
    vocab_size = settings.vocab_size if settings.tokenizer == "bpe" else None
    new = {
        "kind": KIND,
        "version": VERSION,
        "complete": False,
        "format": settings.format,
        "end_of_text": "before" if settings.format == "llm.c" else "after",
        "settings": asdict(settings) | {"vocab_size": vocab_size},
        "sources": [source._asdict() | {"files": len(source.files)} for source in sources],
        "pieces": 0,
        "skipped": {"documents": 0, "first": []},
        "splits": {split: {"documents": 0, "tokens": 0, "bytes": 0, "shards": []} for split in SPLITS},
    }
    index = read_index(out)
    if index and index["pieces"]:
        _check_same(out, index, new)
    elif not index or any(index[key] != new[key] for key in ("settings", "sources")):
        for path in [*out.glob("*.bin"), *out.glob("*.part")]:
            path.unlink()
        index = new
        write_index(out, index)
    return index


def _check_same(out: Path, index: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise `UserError` if the settings or sources differ from the settings and sources of the index."""
    names = [" ".join(source["name"] for source in each["sources"]) for each in (index, new)]
    pairs = {
        f"--{key.replace('_', '-')}": (index["settings"].get(key), value) for key, value in new["settings"].items()
    }
    for what, (old, value) in {"the sources": names, **pairs}.items():
        if old != value:
            raise UserError(f"{out} was created with {what} {old}, not {value}: use {old}, or another --out")
    for was, source in zip(index["sources"], new["sources"], strict=True):
        if was != source:
            raise UserError(
                f"{source['name']} has changed since {out} was created (then {was['files']:,} files, {was['size']:,} bytes; "
                f"now {source['files']:,} files, {source['size']:,} bytes): choose another --out"
            )


def _tokenizer(
    out: Path, index: dict[str, Any], given: Tokenizer | None, settings: Settings, sources: Sequence[Source], skip: bool
) -> Tokenizer:
    """Return the tokenizer of the directory; create it if the directory is new."""
    if "tokenizer" not in index:
        text = sample_text(sources, settings.field, GPT2_CUTS, BPE_SAMPLE, skip)
        tokenizer = given or train_bpe(text, settings.vocab_size)
        entry = {"name": settings.tokenizer} | save_tokenizer(out, tokenizer)
        index |= {"dtype": token_dtype(tokenizer.vocab_size).name, "tokenizer": entry}
        write_index(out, index)
    tokenizer = Prepared(out, index).tokenizer
    if given and not (same_ids(given, tokenizer) and given.eos_id == tokenizer.eos_id):
        raise UserError(f"--tokenizer {settings.tokenizer} has changed since {out} was created: choose another --out")
    return tokenizer


def _encoded(pieces: Iterator[Piece], workers: int, out: Path, settings: Settings) -> Generator[list[Encoded]]:
    """Encode batches of pieces in order, in this process or in several."""
    if workers == 1:
        encode = Encoder(out, settings)
        yield from map(encode, _batches(pieces))
        return
    spawn = multiprocessing.get_context("spawn")  # forking is not safe in a process with threads
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (out, settings))
    waiting = deque["Future[list[Encoded]]"]()
    try:
        for batch in _batches(pieces):
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * workers + 2:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)
    except BrokenProcessPool:
        raise TrainingFailed(
            "a worker process was killed, perhaps because memory ran out: use fewer --workers; the same command continues"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
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


class Encoder:
    """Encodes pieces with the tokenizer of a directory, and chooses the split of each document.

    A document is for validation if the first 64 bits of its SHA-256 are below `val_fraction`.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        self._tokenizer = load_tokenizer(out / TOKENIZER_FILE)
        self._encode = fast_encoder(self._tokenizer) or self._tokenizer.encode
        self._cuts = cuts_of(self._tokenizer)
        self._end = np.array([self._tokenizer.eos_id], token_dtype(self._tokenizer.vocab_size))
        self._is_end_before = settings.format == "llm.c"
        self._val_below = int(settings.val_fraction * 2.0**64)

    def __call__(self, pieces: Sequence[Piece]) -> list[Encoded]:
        return [self._encoded(piece) for piece in pieces]

    def _encoded(self, piece: Piece) -> Encoded:
        try:
            text = piece.text()
            ids = self._ids(piece.where, text)
        except UserError as e:
            if not (piece.first and piece.last):
                raise  # the beginning of the document may be written
            return Encoded(b"", "train", 0, True, piece.read, str(e))
        if piece.first and self._is_end_before:
            ids = [self._end, *ids]
        if piece.last and not self._is_end_before:
            ids = [*ids, self._end]
        data = text.encode()
        digest = piece.digest or hashlib.sha256(data).digest()
        split = "val" if int.from_bytes(digest[:8], "big") < self._val_below else "train"
        joined = np.concatenate(ids, dtype=self._end.dtype, casting="unsafe").tobytes()
        return Encoded(joined, split, len(data), piece.first, piece.read)

    def _ids(self, where: str, text: str) -> list[np.ndarray]:
        pieces = cut(text, self._cuts)
        check_cuts(where, pieces)
        try:
            return [self._encode(piece) for piece in pieces]
        except UserError as e:
            raise UserError(f"{where}: {e}") from None


_encoder: Encoder  # set in a worker process


def _start_worker(out: Path, settings: Settings) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encoder = Encoder(out, settings)


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise this process would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(pieces: Sequence[Piece]) -> list[Encoded]:
    return _encoder(pieces)
