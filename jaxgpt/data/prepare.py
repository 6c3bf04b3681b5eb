"""Tokenize documents to shards of ids with an index, in several processes and bounded memory, resumable at any moment."""

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
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.config import MAX_VOCAB
from jaxgpt.data.documents import (
    HUB,
    START,
    Chunk,
    Cursor,
    File,
    Part,
    Source,
    Span,
    Table,
    check_cuts,
    list_sources,
    read_chunks,
    sample_text,
)
from jaxgpt.data.encode import Tokenizer
from jaxgpt.data.fast import batch_encoder
from jaxgpt.data.pieces import GPT2_CUTS, cut, find_by
from jaxgpt.data.shards import (
    INDEX,
    KIND,
    PART,
    SPLITS,
    TOKENIZER_FILE,
    Format,
    Prepared,
    ShardWriter,
    file_sha256,
    read_index,
    same_ids,
    save_tokenizer,
    token_dtype,
    write_json,
)
from jaxgpt.data.tokenizer import KINDS, load_tokenizer, make_tokenizer, train_bpe
from jaxgpt.errors import TrainingFailed, UserError, as_float, as_int
from jaxgpt.files import LOCK, sole_writer

BPE_SAMPLE = 200_000_000  # bytes of text that a BPE tokenizer is trained on
BATCH = 1 << 20  # characters to encode at once
SAVE_EVERY = 30.0  # seconds between writes of index.json while no shard is finished
SMALL = 4 << 20  # bytes of sources below which starting processes takes longer than encoding
NAMED = 10  # skipped documents to name
MAX_SHARD = 2**31 - 1  # ids; the header of llm.c has 32 bits for their number


@dataclass(frozen=True)
class Settings:
    """What determines the shards, apart from the contents of the sources.

    Attributes:
        sources: files, folders, or names of Hugging Face datasets after `hf:`.
        tokenizer: gpt2, bpe (trained on the sources), or the path of a tokenizer or run.
        vocab_size: maximum vocabulary size of bpe.
        format: llm.c or nanogpt.
        shard_tokens: ids in a shard of llm.c's format.
        val_fraction: fraction of the documents for validation.
        table: where the text is in JSON Lines, Parquet and datasets.
    """

    sources: tuple[str, ...]
    tokenizer: str = "gpt2"
    vocab_size: int = 32768
    format: Format = "llm.c"
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.005
    table: Table = field(default_factory=Table)

    def __post_init__(self) -> None:
        as_int("--shard-tokens", self.shard_tokens, 1, MAX_SHARD)
        as_float("--val-fraction", self.val_fraction, 0.0, 1.0, open_end=True)
        as_int("--vocab-size", self.vocab_size, 257, MAX_VOCAB)
        if not self.sources:
            raise UserError("no sources: name files, folders or datasets")

    def entries(self) -> dict[str, Any]:
        """Return the settings by their names on the command line."""
        return {
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size if self.tokenizer == "bpe" else None,
            "format": self.format,
            "shard_tokens": self.shard_tokens,
            "val_fraction": self.val_fraction,
        } | asdict(self.table)


class Status(NamedTuple):
    """Progress so far.

    Attributes:
        documents: documents written, those of an earlier process included.
        tokens: ids written.
        read: bytes of the sources read.
        total: bytes of the sources; 0 if unknown.
    """

    documents: int
    tokens: int
    read: int
    total: int


class Encoded(NamedTuple):
    """The ids of a chunk.

    Attributes:
        splits: for each split, the ids, the indices at which documents start, and the bytes of text.
        skipped: why documents cannot be read.
    """

    splits: Mapping[str, tuple[np.ndarray, np.ndarray, int]]
    skipped: Sequence[str]


class _Document(NamedTuple):
    """A document to encode."""

    place: str
    text: str
    split: str
    size: int


class Encoder:
    """Encodes chunks, and chooses the split of each document.

    Args:
        tokenizer: the tokenizer.
        style: llm.c writes the end-of-text id before each document, nanoGPT after it.
        val_fraction: a document is for validation if the first 64 bits of its SHA-256 are below this fraction. The first one
            is always for training.
    """

    def __init__(self, tokenizer: Tokenizer, style: Format, val_fraction: float) -> None:
        assert tokenizer.eos_id is not None
        self._tokenizer, self._before = tokenizer, style == "llm.c"
        self._limit = int(val_fraction * 2.0**64)
        self._end = np.array([tokenizer.eos_id], token_dtype(tokenizer.vocab_size))
        self._encode, self.library = batch_encoder(tokenizer)

    def __call__(self, chunk: Chunk) -> Encoded:
        if isinstance(chunk.payload, Part):
            return self._part(chunk.payload, chunk.span.begin.file == 0)
        parts: dict[str, list[np.ndarray]] = {split: [self._end[:0]] for split in SPLITS}
        lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
        sizes, skipped, held, waiting = dict.fromkeys(SPLITS, 0), list[str](), list[_Document](), 0

        def flush() -> None:
            for document, ids in zip(held, self._ids_of([document.text for document in held]), strict=True):
                if isinstance(ids, UserError):
                    skipped.append(f"{document.place}: {ids}")
                    continue
                parts[document.split] += [self._end, ids] if self._before else [ids, self._end]
                lengths[document.split].append(len(ids) + 1)
                sizes[document.split] += document.size
            held.clear()

        for number, (place, text) in enumerate(chunk.payload.documents()):
            if isinstance(text, UserError):
                flush()  # which may skip an earlier document
                skipped.append(str(text))
                continue
            data = text.encode()
            first = not number and chunk.span.begin == START
            held.append(_Document(place, text, self._split(hashlib.sha256(data).digest(), first), len(data)))
            waiting += len(text)
            if waiting >= BATCH:
                flush()
                waiting = 0
        flush()
        splits = {}
        for split in SPLITS:
            starts = np.cumsum([0, *lengths[split]], dtype=np.int64)[:-1]
            splits[split] = (np.concatenate(parts[split]), starts, sizes[split])
        return Encoded(splits, skipped)

    def _part(self, part: Part, first: bool) -> Encoded:
        try:
            ids = self._encode_batches(part.pieces)
        except UserError as e:
            raise UserError(f"{part.name}: {e}") from None
        before = [self._end] if part.first and self._before else []
        after = [self._end] if part.last and not self._before else []
        size = sum(len(piece.encode()) for piece in part.pieces)
        starts = np.zeros(int(part.first), np.int64)
        return Encoded({self._split(part.digest, first): (np.concatenate([*before, *ids, *after]), starts, size)}, [])

    def _split(self, hashed: bytes, first: bool) -> str:
        return "val" if not first and int.from_bytes(hashed[:8], "big") < self._limit else "train"

    def _ids_of(self, texts: list[str]) -> list[np.ndarray | UserError]:
        """Encode texts, long ones in pieces; return the ids of each, or why it cannot be encoded."""
        pieces = [cut(text, self._tokenizer.find) for text in texts]
        try:
            if error := check_cuts([piece for each in pieces for piece in each]):
                raise error
            encoded = iter(self._encode_batches([piece for each in pieces for piece in each]))
        except UserError as e:
            return [e] if len(texts) == 1 else [self._ids_of([text])[0] for text in texts]
        return [np.concatenate([next(encoded) for _ in each]) for each in pieces]

    def _encode_batches(self, pieces: Sequence[str]) -> list[np.ndarray]:
        found, begin, size = list[np.ndarray](), 0, 0
        for at, piece in enumerate(pieces, 1):
            size += len(piece)
            if size >= BATCH or at == len(pieces):
                found += [ids.astype(self._end.dtype) for ids in self._encode(pieces[begin:at])]
                begin, size = at, 0
        return found


def prepare(
    settings: Settings,
    out: Path,
    workers: int = 0,
    on_error: Literal["fail", "skip"] = "fail",
    report: Callable[[Status], None] = lambda status: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokenize documents to shards of ids with an index.

    Can be killed at any moment: called again with the same arguments, it continues, and writes the same bytes as if it had not
    been interrupted. The number of workers does not matter either. Called once more, it compares the files with their
    checksums.

    Args:
        settings: what to write.
        out: folder to write to; new, empty, or written by an earlier call with the same settings.
        workers: processes; 0: one for each core.
        on_error: on a document that cannot be read: raise an error, or count it and continue.
        report: called with the progress.
        note: called with messages.

    Returns:
        The content of index.json.

    Raises:
        UserError: the sources, settings or folder cannot be used, or a document cannot be read.
        TrainingFailed: a process was killed.
    """
    as_int("--workers", workers, 0, 4096)
    sources, files = list_sources(settings.sources, settings.table)
    for source in settings.sources:
        if not source.startswith(HUB) and Path(source).resolve() in [out.resolve(), *out.resolve().parents]:
            raise UserError(f"--out {out} is inside the source {source}: choose another --out")
    given = None if settings.tokenizer == "bpe" else _named_tokenizer(settings.tokenizer)
    vocab_size = given.vocab_size if given else settings.vocab_size
    if settings.format == "nanogpt" and token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")
    _claim(out)
    with sole_writer(out):
        index = read_index(out)
        if index is None or not _begun(index):
            index = _new_index(settings, sources)
            write_json(out / INDEX, index)
        try:
            _check_same(index, settings, sources, on_error, out)
            if index["complete"]:
                Prepared(out, index).check(checksums=True)
                note(f"{out} is complete, and its files have the SHA-256 in {INDEX}")
                return index
            tokenizer = _tokenizer(index, settings, files, given, on_error == "skip", out)
            writers = {
                split: ShardWriter(out, split, np.dtype(index["dtype"]), settings.format, settings.shard_tokens)
                for split in SPLITS
            }
            begin = START
            if saved := index.get("progress"):
                begin = Cursor(*saved["cursor"])
                for split, writer in writers.items():
                    writer.restore(saved["splits"][split])
                done = sum(writer.documents for writer in writers.values())
                note(f"resuming {out} after {done:,} documents")
            else:
                for writer in writers.values():
                    writer.restore(
                        {"documents": 0, "bytes": 0, "shards": [], "unfinished": {"tokens": 0, "documents": 0}}
                    )
        except (KeyError, TypeError, AttributeError) as e:
            raise UserError(
                f"{out / INDEX} is damaged ({type(e).__name__}: {e}): delete {out} and start again"
            ) from None
        with closing(_Writers(out, index, writers, begin)) as writing:
            chunks = read_chunks(files, settings.table, tokenizer.find, begin)
            total = 0 if any(file.path is None for file in files) else sum(file.size for file in files)
            workers = workers or (1 if 0 < total < SMALL else _cores())
            encoder = _encoding(workers, chunks, out, settings)
            with closing(encoder) as results:
                for span, encoded in results:
                    writing.add(span, encoded, on_error == "skip")
                    report(Status(*writing.counts(), span.read, total))
            return writing.complete()


class _Writers:
    """The state of the output: shards and index."""

    def __init__(self, out: Path, index: dict[str, Any], writers: Mapping[str, ShardWriter], begin: Cursor) -> None:
        self._out, self._index, self._writers, self._cursor = out, index, writers, begin
        self._saved = time.monotonic()

    def add(self, span: Span, encoded: Encoded, skip: bool) -> None:
        if encoded.skipped and not skip:
            self._save()
            raise UserError(f"{encoded.skipped[0]}; to skip such documents, use --on-error skip")
        shards = sum(len(writer.shards) for writer in self._writers.values())
        source = self._index["sources"][span.source]
        for split, (ids, starts, size) in encoded.splits.items():
            self._writers[split].write(ids, starts, size)
            source["documents"] += len(starts)
            source["tokens"] += len(ids)
        skipped = self._index["skipped"]
        skipped["documents"] += len(encoded.skipped)
        skipped["first"] += encoded.skipped[: NAMED - len(skipped["first"])]
        self._cursor = span.end
        finished = sum(len(writer.shards) for writer in self._writers.values()) > shards
        if finished or time.monotonic() - self._saved > SAVE_EVERY:
            self._save()

    def counts(self) -> tuple[int, int]:
        """Return the documents and ids written so far."""
        return sum(w.documents for w in self._writers.values()), sum(w.tokens for w in self._writers.values())

    def complete(self) -> dict[str, Any]:
        """Finish the last shards and the index.

        Raises:
            UserError: there are no training documents.
        """
        if not self._writers["train"].documents:
            skipped, val = self._index["skipped"]["documents"], self._writers["val"].documents
            names = ", ".join(source["name"] for source in self._index["sources"])
            raise UserError(
                f"no documents for training in {names} ({skipped:,} skipped, {val:,} for validation): use other sources"
                + ", or a lower --val-fraction" * (val > 0)
            )
        for writer in self._writers.values():
            writer.finish()
        splits = {split: writer.facts() for split, writer in self._writers.items()}
        self._index.pop("progress", None)
        self._index |= {"complete": True, "splits": splits}
        write_json(self._out / INDEX, self._index)
        for path in self._out.glob(f"*{PART}"):
            path.unlink()
        return self._index

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _save(self) -> None:
        """Write everything to disk, then the index, which says from where to continue."""
        saved = {split: writer.save() for split, writer in self._writers.items()}
        self._index["progress"] = {"cursor": list(self._cursor), "splits": saved}
        write_json(self._out / INDEX, self._index)
        self._saved = time.monotonic()


def _claim(out: Path) -> None:
    """Create the folder, or check that it may be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in out.iterdir() if path.name not in (LOCK, INDEX + PART))
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e.strerror}") from None
    if found and read_index(out) is None:
        raise UserError(f"{out} is not empty and was not written by jaxgpt data prepare: choose another --out")


def _named_tokenizer(name: str) -> Tokenizer:
    if name in KINDS and name not in ("gpt2", "byte") and not Path(name).exists():
        raise UserError(f"--tokenizer {name} is not supported: use gpt2, bpe, or the path of a tokenizer or run")
    tokenizer = make_tokenizer(name, "", 0, 0) if name in ("gpt2", "byte") else load_tokenizer(Path(name))
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {name} has no end-of-text token to separate documents with: use gpt2, bpe or another"
        )
    return tokenizer


def _new_index(settings: Settings, sources: Sequence[Source]) -> dict[str, Any]:
    return {
        "kind": KIND,
        "version": 1,
        "complete": False,
        "format": settings.format,
        "end_of_text": "before" if settings.format == "llm.c" else "after",
        "settings": settings.entries(),
        "sources": [asdict(source) | {"documents": 0, "tokens": 0} for source in sources],
        "skipped": {"documents": 0, "first": []},
    }


def _begun(index: Mapping[str, Any]) -> bool:
    """Return whether any ids have been written; if not, nothing is lost by starting again with other settings or sources."""
    splits = index.get("progress", {}).get("splits", {}).values()
    return index["complete"] or any(split["tokens"] for split in splits)


def _check_same(
    index: Mapping[str, Any], settings: Settings, sources: Sequence[Source], on_error: str, out: Path
) -> None:
    """Check that the folder was begun with the same settings and sources.

    Raises:
        UserError: it was not.
    """
    fix = f"use the same, or another --out than {out}"
    if index["version"] != 1:
        raise UserError(f"{out / INDEX} has version {index['version']}, and only version 1 is supported: {fix}")
    old = [source["name"] for source in index["sources"]]
    if old != [source.name for source in sources]:
        raise UserError(f"{out} was begun with the sources {' '.join(old)}: {fix}")
    for name, value in settings.entries().items():
        if (was := index["settings"].get(name)) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{out} was begun with {flag} {was}, not {flag} {value}: {fix}")
    for was, source in zip(index["sources"], sources, strict=True):
        if was["fingerprint"] != source.fingerprint:
            raise UserError(
                f"{source.name} has changed since {out} was begun (then {was['files']:,} files, {was['size']:,} bytes; now "
                f"{source.files:,} files, {source.size:,} bytes): choose another --out"
            )
    if index["skipped"]["documents"] and on_error == "fail":
        raise UserError(f"{out} was begun with --on-error skip, and documents were skipped: {fix}")


def _tokenizer(
    index: dict[str, Any], settings: Settings, files: Sequence[File], given: Tokenizer | None, skip: bool, out: Path
) -> Tokenizer:
    """Return the tokenizer of the folder, after making it and writing it if the folder is new."""
    if "tokenizer" not in index:
        if given is None:
            find = find_by(GPT2_CUTS)
            given = train_bpe(sample_text(files, settings.table, find, BPE_SAMPLE, skip), settings.vocab_size)
        dtype = token_dtype(given.vocab_size)
        entry = {"name": settings.tokenizer} | save_tokenizer(out, given) | {"end_id": given.eos_id}
        index |= {"dtype": dtype.name, "library": f"tokenizers {version('tokenizers')}", "tokenizer": entry}
        write_json(out / INDEX, index)
        given = None  # it has just been written
    path = out / TOKENIZER_FILE
    if not path.is_file() or file_sha256(path) != index["tokenizer"]["sha256"]:
        raise UserError(f"{path} is not the file that {out} was begun with: delete {out} and start again")
    tokenizer = load_tokenizer(path)
    if tokenizer.eos_id != index["tokenizer"]["end_id"] or (given is not None and not same_ids(given, tokenizer)):
        raise UserError(f"--tokenizer {settings.tokenizer} has changed since {out} was begun: choose another --out")
    return tokenizer


def _encoding(workers: int, chunks: Iterator[Chunk], out: Path, settings: Settings) -> Generator[tuple[Span, Encoded]]:
    """Encode chunks in order, in this process or in several."""
    if workers == 1:
        encoder = Encoder(load_tokenizer(out / TOKENIZER_FILE), settings.format, settings.val_fraction)
        yield from ((chunk.span, encoder(chunk)) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),  # fork is not safe beside the threads of libraries
        _start_worker,
        (str(out / TOKENIZER_FILE), settings.format, settings.val_fraction),
    )
    waiting = deque[tuple[Span, "Future[Encoded]"]]()
    try:
        for chunk in chunks:
            waiting.append((chunk.span, pool.submit(_encode_in_worker, chunk)))
            if len(waiting) > 2 * workers + 2:
                span, future = waiting.popleft()
                yield span, future.result()
        while waiting:
            span, future = waiting.popleft()
            yield span, future.result()
    except BrokenProcessPool:
        raise TrainingFailed(
            "a worker process was killed, perhaps because memory ran out: use fewer --workers; the same command resumes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder | None = None  # of a worker process


def _start_worker(tokenizer: str, style: Format, val_fraction: float) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(load_tokenizer(Path(tokenizer)), style, val_fraction)


def _end_with_parent() -> None:
    """End this process when its parent is killed, which leaves it waiting for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _encoder is not None
    return _encoder(chunk)


def _cores() -> int:
    with suppress(AttributeError):  # only on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
