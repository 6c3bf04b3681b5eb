"""Write encoded pieces to the shards of their splits, and the resume position to the index."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from jaxgpt.data.prepared.index import SPLITS, Index, write_index
from jaxgpt.data.prepared.piece_encoder import EncodedPiece
from jaxgpt.data.prepared.repeats import Repeats
from jaxgpt.data.prepared.shard_writer import ShardWriter
from jaxgpt.data.prepared.skips import count_skipped
from jaxgpt.errors import UserError, plural
from jaxgpt.progress import Progress

SAVE_EVERY = 30.0  # minimum seconds between writes of index.json, unless a shard is completed


def write_pieces(
    out: Path,
    index: Index,
    batches: Iterable[list[EncodedPiece]],
    repeats: Repeats | None,
    progress: Progress,
    total: int,
) -> None:
    """Write pieces until the output is complete; save the resume position at intervals, and after each completed shard.

    Args:
        out: output directory.
        index: index of the directory, which is updated.
        batches: encoded pieces.
        repeats: documents seen so far; None: repeated documents are written.
        progress: receives the bytes of the sources read after the first batch, and the numbers of documents and tokens. Until
            the first batch, a continued command skips processed pieces, much faster than it encodes.
        total: bytes of all sources.
    """
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(ShardWriter(out, index, split))) for split in SPLITS}
        saved = time.monotonic()
        start: int | None = None  # bytes read by the end of the first batch
        for batch in batches:
            for piece in batch:
                is_complete = _write_piece(piece, writers, index, repeats)
                index["pieces"] += 1
                if is_complete or time.monotonic() - saved > SAVE_EVERY:
                    _save(out, index, writers)
                    saved = time.monotonic()

            read = batch[-1].bytes_read
            if start is None:
                start = read
                progress.stage("tokenizing")
            progress(read - start, max(total - start, 0), _counts(index))

        if not index["splits"]["train"]["documents"]:
            raise _no_documents(index)
        for writer in writers.values():
            writer.finish()

    index["complete"] = True
    write_index(out, index)


def _save(out: Path, index: Index, writers: Mapping[str, ShardWriter]) -> None:
    """Write the index after the shards, so that it describes only what is on disk."""
    for writer in writers.values():
        writer.sync()
    write_index(out, index)


def _counts(index: Index) -> str:
    """Return the numbers of documents and tokens so far."""
    splits = index["splits"].values()
    documents = sum(split["documents"] for split in splits)
    tokens = sum(split["tokens"] for split in splits)
    return f"{plural(documents, 'document')}, {plural(tokens, 'token')}"


def _write_piece(
    piece: EncodedPiece, writers: Mapping[str, ShardWriter], index: Index, repeats: Repeats | None
) -> bool:
    """Write, drop or skip a piece, and count it in the index; return whether it completes a shard."""
    if piece.unreadable:
        count_skipped(index["skipped"], piece.unreadable)
    if piece.unwritten == "unreadable":
        return False
    if piece.unwritten == "short":
        index["dropped"]["short"] += 1
        return False
    new_documents = 1 if piece.begins_document else 0  # number of documents that begin with this piece
    if repeats is not None and repeats.add(piece.begins_document, piece.identity):
        index["dropped"]["repeated"] += new_documents
        return False

    index["markers"] += piece.markers
    writer = writers[piece.split]
    is_complete = writer.write(piece.ids)
    writer.entry["documents"] += new_documents
    writer.entry["bytes"] += piece.size
    return is_complete


def _no_documents(index: Index) -> UserError:
    """Return the error for sources without documents for training."""
    first = index["skipped"]["first"][:1]
    reason = f"; the first error: {first[0]}" if first else ""
    return UserError(f"no documents for training ({_dropped(index)}): use other sources{reason}")


def _dropped(index: Index) -> str:
    """Return the numbers of documents and files that are not written, such as `1 file skipped`."""
    skipped = index["skipped"]
    dropped = index["dropped"]
    counts = [
        (skipped["documents"], f"{plural(skipped['documents'], 'document')} skipped"),
        (skipped["files"], f"{plural(skipped['files'], 'file')} skipped"),
        (dropped["short"], f"{dropped['short']:,} too short"),
    ]
    texts = [text for number, text in counts if number]
    return ", ".join(texts) or "no document was found"
