"""Batches of document pieces, and their encoding in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxgpt.data.prepared.document_piece import DocumentPiece
from jaxgpt.data.prepared.piece_encoder import EncodedPiece

BATCH = 1 << 20  # minimum bytes or characters of a batch, except the last batch


def batches_of(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    """Group pieces into batches; a batch ends when it has at least `BATCH` bytes or characters."""
    batch: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.content) if piece.content else 1
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def encode_in_threads(
    encode: Callable[[Sequence[DocumentPiece]], list[EncodedPiece]],
    batches: Iterator[list[DocumentPiece]],
    workers: int,
) -> Generator[list[EncodedPiece]]:
    """Encode batches in threads, two batches ahead per thread; yield results in the order of the batches."""
    waiting = deque["Future[list[EncodedPiece]]"]()
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
