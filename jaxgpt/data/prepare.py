"""Tokenize documents into shards of ids, on all cores and in bounded memory.

Documents are a numbered sequence of pieces (`documents.DocumentPiece`). index.json records the number of pieces written, and
the length of each shard at that moment. After an interruption, the shards are truncated to these lengths and encoding continues
with the next piece. The output is the same as without the interruption.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import PrepareParams
from jaxgpt.data import shards
from jaxgpt.data.bos import document_bos, with_bos
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.documents import SKIP, DocumentPiece, beginning, check_first, read_pieces, sample_text, unreadable
from jaxgpt.data.dropped import Repeats, count_skipped
from jaxgpt.data.fast import fast_encoder
from jaxgpt.data.output import begin, check_older_cuts, new_output, set_tokenizer
from jaxgpt.data.shards import SPLITS, ShardWriter
from jaxgpt.data.sources import Source, find_source, repeated_text, structured_text
from jaxgpt.data.tokenizer import EOS_NAMES, Tokenizer
from jaxgpt.data.tokenizer_files import FROM_TEXT, make_tokenizer
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError, plural, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.runtime import cores

BPE_SAMPLE = 200_000_000  # approximate bytes of text for training a BPE tokenizer
BATCH = 1 << 20  # minimum bytes or characters of a batch that a thread encodes, except the last batch
SAVE_EVERY = 30.0  # minimum seconds between writes of index.json, unless a shard is completed


class Encoded(NamedTuple):
    """The ids of a piece."""

    ids: bytes  # ids in the dtype of the shards
    split: str  # train or val
    size: int  # bytes of text
    first: bool  # whether a document starts with this piece; False if the complete document is skipped
    read: int  # bytes of the sources read from disk so far
    skipped: str = ""  # error of a piece that cannot be read or encoded; empty: no error
    file: str = ""  # file of an unreadable piece
    lost: str = ""  # loss by the error, as in `DocumentPiece`
    identity: bytes = b""  # SHA-256 of the complete document; empty: unknown
    is_short: bool = False  # whether the document has fewer than `min_characters`
    markers: int = 0  # number of end-of-text tokens written as text


def prepare(
    names: Sequence[str],
    out: Path,
    params: PrepareParams,
    progress: Progress = NO_PROGRESS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokenize documents into shards of ids with an index, and return the index.

    A call with the same arguments continues an interrupted call; if the directory is complete, the call compares
    its files with their checksums.

    Args:
        names: files, directories or Hugging Face datasets (`hf:OWNER/NAME[/PATTERN]`).
        out: output directory: new, empty, or from an earlier call with the same parameters.
        progress: receives the bytes of the sources read since the call, and the numbers of documents and tokens.
        note: callback for one-line messages to the user.

    Raises:
        UserError: if the sources, parameters or directory cannot be used, or (with `on_error` fail) a document is unreadable.
        OSError: if a file cannot be written.
    """
    if any(Path(name).resolve() == out.resolve() for name in names):
        raise UserError(f"--out {out} is a source: choose a different --out")
    sources = [find_source(name) for name in names]
    for source in sources:
        if source.skipped:
            note(f"{source.name}: skipped {source.skipped}")
    if params.on_error == "fail":
        check_first(sources, params)

    original = _named_tokenizer(params)
    original_sha256 = hashlib.sha256(original.to_json().encode()).hexdigest() if original else ""
    tokenizer = with_bos(original, params.bos) if original else None
    bos_ids = list(document_bos(tokenizer)) if tokenizer else []
    _check_id_width(params, tokenizer.vocab_size if tokenizer else params.vocab_size)

    with new_output(out):
        index = begin(out, params, sources, original_sha256, bos_ids, note)
        if index["complete"]:
            shards.check_files(out, index, checksums=True)
            shards.saved_tokenizer(out, index)
            note(f"{out} is complete, and its files match the checksums in {INDEX}")
            return index

        for text in _notes_on_texts(sources, params):
            note(text)
        if "tokenizer" not in index:
            tokenizer = tokenizer or train_bpe(partial(sample_text, sources, params), params.vocab_size, BPE_SAMPLE)
            set_tokenizer(out, index, tokenizer, params.tokenizer, bos_ids)
        if index["pieces"]:
            documents = sum(index["splits"][split]["documents"] for split in SPLITS)
            note(f"continuing {out} after {plural(documents, 'document')}")
        _write_remaining(out, index, sources, params, progress)
        if params.separator and not _is_divided(index, sources):
            note(
                f"--separator {short_repr(params.separator)} separates no documents of the sources; a line break is $'\\n' in "
                f"most shells, not '\\n'"
            )
        return index


def _named_tokenizer(params: PrepareParams) -> Tokenizer | None:
    """Return the tokenizer that the parameters name, or None for a BPE, which is trained on the sources.

    Raises:
        UserError: if the tokenizer lacks the tokens that end and begin documents.
    """
    name = params.tokenizer
    if name == "bpe":
        if params.bos == "yes":
            raise UserError(
                "--bos yes: a trained bpe has no beginning-of-text token; use --bos auto, or a different tokenizer"
            )
        return None
    tokenizer = None if name in FROM_TEXT or name == "ids" else make_tokenizer(name)
    if tokenizer is None or tokenizer.eos_id is None:
        raise UserError(f"the tokenizer {name} has no end-of-text token to separate documents: use gpt2 or bpe")
    return tokenizer


def _check_id_width(params: PrepareParams, vocab_size: int) -> None:
    """Raise `UserError` if the format cannot hold the ids of a vocabulary."""
    if params.format == "nanogpt" and shards.token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")


def _notes_on_texts(sources: Sequence[Source], params: PrepareParams) -> Iterator[str]:
    """Yield notes on repeated documents that are kept, and on markup that becomes text."""
    repeated = repeated_text(sources, partial(beginning, params=params))
    if repeated and params.dedup == "none":
        yield repeated
    structured = structured_text(sources)
    if structured:
        yield structured


def _write_remaining(
    out: Path, index: dict[str, Any], sources: Sequence[Source], params: PrepareParams, progress: Progress
) -> None:
    """Read, encode and write the pieces after those in the index, with the tokenizer that an earlier call may have saved."""
    tokenizer = shards.saved_tokenizer(out, index)
    check_older_cuts(out, index, tokenizer)
    pieces = read_pieces(sources, params, tokenizer.cuts)
    repeats = None if params.dedup == "none" else Repeats()
    _skip(islice(pieces, index["pieces"]), repeats, params)

    encode = _Encoder(tokenizer, params, index["settings"].get("bos_ids", []))
    encoded = _in_order(encode, _batches(pieces), params.workers or cores())
    total = sum(source.size for source in sources)
    try:
        with closing(encoded):
            _write(out, index, encoded, repeats, progress, total)
    except OSError as e:  # for example, a full disk
        raise OSError(e.errno, e.strerror, e.filename or str(out)) from None


def _is_divided(index: Mapping[str, Any], sources: Sequence[Source]) -> bool:
    """Return whether there are more documents than files, including those that are not written."""
    documents = sum(index["splits"][split]["documents"] for split in SPLITS)
    dropped = index["dropped"]["repeated"] + index["dropped"]["short"] + index["skipped"]["documents"]
    return documents + dropped > sum(len(source.files) for source in sources)


def _skip(written: Iterable[DocumentPiece], repeats: Repeats | None, params: PrepareParams) -> None:
    """Read the pieces that an interrupted command has written, and add their documents to `repeats`."""
    if repeats is None:
        deque(written, maxlen=0)
        return
    for piece in written:
        identity = piece.identity
        is_first = piece.first
        if piece.first and piece.last:
            try:
                text = piece.text()
            except UserError:
                continue
            identity = hashlib.sha256(text.encode()).digest()
            is_first = not _is_short(piece, text, params)
        repeats.add(is_first, identity)


def _is_short(piece: DocumentPiece, text: str, params: PrepareParams) -> bool:
    """Return whether a document is dropped because of its length; a document in several pieces never is."""
    return piece.first and piece.last and len(text.strip()) < params.min_characters


def _write(
    out: Path,
    index: dict[str, Any],
    batches: Iterable[list[Encoded]],
    repeats: Repeats | None,
    progress: Progress,
    total: int,
) -> None:
    """Append pieces to the shards of their splits, and record the progress in the index."""
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(ShardWriter(out, index, split))) for split in SPLITS}
        saved = time.monotonic()
        start: int | None = None  # bytes read before an interruption, and in the first batch
        for batch in batches:
            for piece in batch:
                is_complete = _write_piece(piece, writers, index, repeats)
                index["pieces"] += 1
                if is_complete or time.monotonic() - saved > SAVE_EVERY:
                    # The index describes only what is on disk.
                    for writer in writers.values():
                        writer.sync()
                    shards.write_index(out, index)
                    saved = time.monotonic()

            read = batch[-1].read
            if start is None:
                start = read
                progress.stage("tokenizing")
            progress(read - start, max(total - start, 0), _counts(index))

        if not writers["train"].entry["documents"]:
            first = index["skipped"]["first"][:1]
            reason = f"; the first error: {first[0]}" if first else ""
            raise UserError(f"no documents for training ({_dropped(index)}): use other sources{reason}")
        for writer in writers.values():
            writer.finish()

    index["complete"] = True
    shards.write_index(out, index)


def _counts(index: Mapping[str, Any]) -> str:
    """Return the numbers of documents and tokens so far."""
    splits = index["splits"].values()
    documents = sum(split["documents"] for split in splits)
    tokens = sum(split["tokens"] for split in splits)
    return f"{plural(documents, 'document')}, {plural(tokens, 'token')}"


def _write_piece(
    piece: Encoded, writers: Mapping[str, ShardWriter], index: dict[str, Any], repeats: Repeats | None
) -> bool:
    """Write or drop a piece, and count it in the index; return whether it completes a shard."""
    if piece.skipped:
        count_skipped(index["skipped"], piece.skipped, piece.file, piece.lost)
    if repeats is not None and not piece.is_short:
        repeats.add(piece.first, piece.identity)
    reason = _drop_reason(piece, repeats)
    if reason:
        index["dropped"][reason] += piece.first
        return False

    index["markers"] += piece.markers
    writer = writers[piece.split]
    is_complete = writer.write(piece.ids)
    writer.entry["documents"] += piece.first
    writer.entry["bytes"] += piece.size
    return is_complete


def _drop_reason(piece: Encoded, repeats: Repeats | None) -> str:
    """Return the entry of `dropped` in the index that counts the document of a piece; "": the piece is written."""
    if piece.is_short:
        return "short"
    if repeats is not None and repeats.is_repeat:
        return "repeated"
    return ""


def _dropped(index: Mapping[str, Any]) -> str:
    """Return the numbers of documents and files that are not written, such as `1 file skipped`."""
    skipped = index["skipped"]
    dropped = index["dropped"]
    counts = {
        f"{plural(skipped['documents'], 'document')} skipped": skipped["documents"],
        f"{plural(skipped['files'], 'file')} skipped": skipped["files"],
        f"{dropped['short']:,} too short": dropped["short"],
    }
    return ", ".join(text for text, number in counts.items() if number) or "none is readable"


def _batches(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    """Group pieces into batches; a batch ends when it has at least `BATCH` bytes or characters."""
    batch: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.content) if isinstance(piece.content, str | bytes) else 1
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _in_order(
    encode: Callable[[Sequence[DocumentPiece]], list[Encoded]], batches: Iterator[list[DocumentPiece]], workers: int
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


class _Encoder:
    """Encodes pieces, and selects the split of each document, which begins with `bos_ids`.

    A document is for validation if the first 64 bits of `DocumentPiece.digest` (if empty, of the SHA-256 of its text) are below
    `val_fraction * 2**64`. An unreadable document has no ids; if only part of a document is unreadable, its other pieces are
    written. Calls run in threads: `tokenizers` and tiktoken release the GIL while they encode.
    """

    def __init__(self, tokenizer: Tokenizer, params: PrepareParams, bos_ids: Sequence[int] = ()) -> None:
        self.params = params
        self._encode = fast_encoder(tokenizer) or tokenizer.encode
        self._end = np.array([tokenizer.eos_id], shards.token_dtype(tokenizer.vocab_size))
        self._bos = np.array(bos_ids, self._end.dtype)
        self._val_below = int(params.val_fraction * 2.0**64)

    def __call__(self, pieces: Sequence[DocumentPiece]) -> list[Encoded]:
        """Encode pieces."""
        return [self.encoded(piece) for piece in pieces]

    def encoded(self, piece: DocumentPiece) -> Encoded:
        """Encode a piece; raise `UserError` if it is unreadable and `on_error` is fail."""
        text = ""
        ids = self._end[:0]
        skipped = ""
        try:
            text = piece.text()
            ids = self._encode(text)
        except UserError as e:
            skipped = unreadable(piece, e)
            if self.params.on_error == "fail":
                raise UserError(f"{skipped}; {SKIP}") from None
            if piece.first and piece.last:
                return _skipped_document(piece, skipped)

        data = text.encode()
        own_digest = hashlib.sha256(data).digest()
        return Encoded(
            ids=self._delimited(piece, ids).tobytes(),
            split=self._split(piece.digest or own_digest),
            size=len(data),
            first=piece.first,
            read=piece.read,
            skipped=skipped,
            file=piece.file,
            lost=piece.lost,
            identity=own_digest if piece.first and piece.last else piece.identity,
            is_short=_is_short(piece, text, self.params),
            markers=text.count(EOS_NAMES[0]),
        )

    def _delimited(self, piece: DocumentPiece, ids: np.ndarray) -> np.ndarray:
        """Add the end-of-text id before a document (llm.c) or after it (nanogpt), and the ids that begin a document."""
        parts = [ids]
        if piece.first:
            parts.insert(0, self._bos)
            if self.params.format == "llm.c":
                parts.insert(0, self._end)
        if piece.last and self.params.format == "nanogpt":
            parts.append(self._end)
        return np.concatenate(parts, dtype=self._end.dtype, casting="unsafe")

    def _split(self, digest: bytes) -> str:
        """Return the split of a document."""
        return "val" if int.from_bytes(digest[:8], "big") < self._val_below else "train"


def _skipped_document(piece: DocumentPiece, skipped: str) -> Encoded:
    """Return the result for a document that is skipped with an error."""
    return Encoded(
        ids=b"",
        split="train",
        size=0,
        first=False,
        read=piece.read,
        skipped=skipped,
        file=piece.file,
        lost=piece.lost,
    )
