"""Tokenize documents into shards of ids, on all cores and in bounded memory.

Documents are a numbered sequence of pieces (`documents.Piece`). index.json records the number of pieces written, and the
length of each shard at that moment. After an interruption, the shards are truncated to these lengths and encoding continues
with the next piece. The output is the same as without the interruption.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import PrepareParams
from jaxgpt.data import shards
from jaxgpt.data.documents import Piece, Source, find_source, read_pieces, sample_text
from jaxgpt.data.fast import fast_encoder
from jaxgpt.data.shards import INDEX, SPLITS, TOKENIZER_FILE, ShardWriter
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import FROM_TEXT, make_tokenizer, save_tokenizer, train_bpe
from jaxgpt.errors import UserError, plural, reported, short_repr
from jaxgpt.files import sha256_file, sole_writer
from jaxgpt.runtime import cores

BPE_SAMPLE = 200_000_000  # approximate bytes of text for training a BPE tokenizer
BATCH = 1 << 20  # minimum bytes or characters of a batch that a thread encodes, except the last batch
SAVE_EVERY = 30.0  # minimum seconds between writes of index.json, unless a shard is completed
SKIPPED = 10  # maximum number of skipped documents listed in the index
ANY_VALUE = ("workers", "on_error")  # parameters that do not affect the written bytes


class Encoded(NamedTuple):
    """The ids of a piece."""

    ids: bytes  # ids in the dtype of the shards
    split: str  # train or val
    size: int  # bytes of text
    first: bool  # whether a document starts with this piece; False if the complete document is skipped
    read: int  # bytes of the sources read from disk so far
    skipped: str = ""  # error of a piece that cannot be read or encoded; empty: no error


def prepare(
    names: Sequence[str],
    out: Path,
    params: PrepareParams,
    report: Callable[[Mapping[str, Any], int, int], None] = lambda index, read, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokenize documents into shards of ids with an index, and return the index.

    A call with the same arguments continues an interrupted call; if the directory is complete, the call compares
    its files with their checksums.

    Args:
        names: files, directories or Hugging Face datasets (`hf:OWNER/NAME[/PATTERN]`).
        out: output directory: new, empty, or from an earlier call with the same parameters.
        report: progress callback; receives the index, the bytes of the sources read so far, and their total bytes.
        note: callback for one-line messages to the user.

    Raises:
        UserError: if the sources, parameters or directory cannot be used, or (with `on_error` fail) a document is unreadable.
        OSError: if a file cannot be written.
    """
    for name in names:
        if Path(name).resolve() in [out.resolve(), *out.resolve().parents]:
            raise UserError(f"--out {out} is the source {name} or inside it: choose a different --out")
    sources = [find_source(name) for name in names]
    tokenizer = None if params.tokenizer == "bpe" else _named_tokenizer(params.tokenizer)
    vocab_size = tokenizer.vocab_size if tokenizer else params.vocab_size
    if params.format == "nanogpt" and shards.token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")
    with reported(f"cannot write to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        others = any(not path.name.startswith(".") for path in out.iterdir())  # hidden files: lock and temporary files
    if others and shards.read_index(out) is None:
        raise UserError(f"{out} has files, but not from this version of jaxgpt data prepare: choose a different --out")
    with sole_writer(out):
        index = _begin(out, params, sources, tokenizer)
        if index["complete"]:
            shards.check_files(out, index, checksums=True)
            shards.saved_tokenizer(out, index)
            note(f"{out} is complete, and its files match the checksums in {INDEX}")
            return index
        if "tokenizer" not in index:
            tokenizer = tokenizer or train_bpe(sample_text(sources, params, BPE_SAMPLE), params.vocab_size)
            save_tokenizer(out, tokenizer)
            index["dtype"] = shards.token_dtype(tokenizer.vocab_size).name
            index["tokenizer"] = {
                "name": params.tokenizer,
                "sha256": sha256_file(out / TOKENIZER_FILE),
                "vocab_size": tokenizer.vocab_size,
                "end_id": tokenizer.eos_id,
            }
            shards.write_index(out, index)
        if index["pieces"]:
            documents = sum(index["splits"][split]["documents"] for split in SPLITS)
            note(f"continuing {out} after {plural(documents, 'document')}")
        tokenizer = shards.saved_tokenizer(out, index)
        total = sum(source.size for source in sources)
        pieces = islice(read_pieces(sources, params, tokenizer.cuts), index["pieces"], None)
        encoded = _in_order(_encoder(tokenizer, params), _batches(pieces), params.workers or cores())
        try:
            with closing(encoded):
                _write(out, index, encoded, lambda read: report(index, read, total))
        except OSError as e:  # for example, a full disk
            raise OSError(e.errno, e.strerror, e.filename or str(out)) from None
        return index


def _write(out: Path, index: dict[str, Any], batches: Iterable[list[Encoded]], report: Callable[[int], None]) -> None:
    """Append pieces to the shards of their splits, and record the progress in the index."""
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(ShardWriter(out, index, split))) for split in SPLITS}
        saved, skipped = time.monotonic(), index["skipped"]
        for batch in batches:
            for piece in batch:
                writer = writers[piece.split]
                is_complete = writer.write(piece.ids)
                writer.entry["documents"] += piece.first
                writer.entry["bytes"] += piece.size
                index["pieces"] += 1
                if piece.skipped:
                    skipped["documents"] += 1
                    skipped["first"] += [piece.skipped] * (len(skipped["first"]) < SKIPPED)
                if is_complete or time.monotonic() - saved > SAVE_EVERY:
                    for each in writers.values():
                        each.sync()
                    shards.write_index(out, index)
                    saved = time.monotonic()
            report(batch[-1].read)
        if not writers["train"].entry["documents"]:
            raise UserError(f"no documents for training ({skipped['documents']:,} skipped): use other sources")
        for writer in writers.values():
            writer.finish()
    index["complete"] = True
    shards.write_index(out, index)


def _named_tokenizer(name: str) -> Tokenizer:
    tokenizer = None if name in FROM_TEXT or name == "ids" else make_tokenizer(name)
    if tokenizer is None or tokenizer.eos_id is None:
        raise UserError(f"the tokenizer {name} has no end-of-text token to separate documents: use gpt2 or bpe")
    return tokenizer


def _begin(out: Path, params: PrepareParams, sources: Sequence[Source], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Read the index, or create it and delete .bin files. Parameters may change before the first piece."""
    settings: dict[str, Any] = {name: value for name, value in asdict(params).items() if name not in ANY_VALUE}
    settings["sources"] = [source._asdict() | {"files": len(source.files)} for source in sources]
    settings["tokenizer_sha256"] = hashlib.sha256(tokenizer.to_json().encode()).hexdigest() if tokenizer else ""
    index = shards.read_index(out)
    if index and (index["pieces"] or index["settings"] == settings):
        for key, value in settings.items():
            if (was := index["settings"][key]) != value:
                raise UserError(
                    f"{out} was created with {key} {_shown(was)}, not {_shown(value)}: use the same value, or a different --out"
                )
        return index
    for path in out.glob("*.bin"):
        path.unlink()
    new = {
        "kind": shards.KIND,
        "complete": False,
        "settings": settings,
        "pieces": 0,
        "skipped": {"documents": 0, "first": []},
        "splits": {split: {"documents": 0, "tokens": 0, "bytes": 0, "shards": []} for split in SPLITS},
    }
    shards.write_index(out, new)
    return new


def _shown(value: Any) -> str:
    """Format the value of a parameter, or the list of sources."""
    if not isinstance(value, list):
        return short_repr(value)
    return ", ".join(f"{each['name']} ({plural(each['files'], 'file')}, {each['size']:,} bytes)" for each in value)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches; a batch ends when it has at least `BATCH` bytes or characters."""
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.content) if isinstance(piece.content, str | bytes) else 1
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(
    encode: Callable[[Sequence[Piece]], list[Encoded]], batches: Iterator[list[Piece]], workers: int
) -> Generator[list[Encoded]]:
    """Encode batches in threads, a few batches ahead; yield results in the order of the batches."""
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
    """Return a function that encodes pieces, and selects the split of each document.

    A document is for validation if the first 64 bits of `Piece.digest` (if empty, of the SHA-256 of its text) are below
    `val_fraction * 2**64`. An unreadable document has no ids; if only part of a document is unreadable, its other pieces are
    written. The function runs in threads: `tokenizers` and tiktoken release the GIL while they encode.
    """
    encode = fast_encoder(tokenizer) or tokenizer.encode
    end = np.array([tokenizer.eos_id], shards.token_dtype(tokenizer.vocab_size))
    val_below = int(params.val_fraction * 2.0**64)

    def encoded(piece: Piece) -> Encoded:
        text, ids, skipped = "", end[:0], ""
        try:
            text = piece.text()
            ids = encode(text)
        except UserError as e:
            skipped = str(e) if piece.where in str(e) else f"{piece.where}: {e}"
            if params.on_error == "fail":
                raise UserError(f"{skipped}; to skip such documents, use --on-error skip") from None
            if piece.first and piece.last:
                return Encoded(b"", "train", 0, False, piece.read, skipped)
        data = text.encode()
        before = piece.first and params.format == "llm.c"
        after = piece.last and params.format == "nanogpt"
        parts = [end] * before + [ids] + [end] * after
        digest = piece.digest or hashlib.sha256(data).digest()
        split = "val" if int.from_bytes(digest[:8], "big") < val_below else "train"
        joined = np.concatenate(parts, dtype=end.dtype, casting="unsafe").tobytes()
        return Encoded(joined, split, len(data), piece.first, piece.read, skipped)

    return lambda pieces: [encoded(piece) for piece in pieces]
