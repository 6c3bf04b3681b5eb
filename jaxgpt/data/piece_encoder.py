"""Encode the pieces of documents, in threads and in order."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxgpt.config import PrepareParams
from jaxgpt.data.document_piece import DocumentPiece, is_short, unreadable
from jaxgpt.data.documents import SKIP
from jaxgpt.data.fast import fast_encoder
from jaxgpt.data.shards import token_dtype
from jaxgpt.data.tokenizer import EOS_NAMES, Tokenizer
from jaxgpt.errors import UserError

BATCH = 1 << 20  # minimum bytes or characters of a batch that a thread encodes, except the last batch


class EncodedPiece(NamedTuple):
    """The ids of a piece."""

    ids: bytes  # ids in the dtype of the shards
    split: str  # train or val
    size: int  # bytes of text
    first: bool  # whether a document starts with this piece; False if the complete document is skipped
    read: int  # bytes of the sources read from disk so far
    skipped: str = ""  # error of a piece that cannot be read or encoded; empty: no error
    file: str = ""  # file of an unreadable piece
    lost: str = ""  # part that the error makes unreadable, as in `DocumentPiece`
    identity: bytes = b""  # SHA-256 of the complete document; empty: unknown
    is_short: bool = False  # whether the document has fewer than `min_characters`
    markers: int = 0  # number of end-of-text tokens written as text


class PieceEncoder:
    """Encodes pieces, and selects the split of each document; `bos_ids` are written before the text of a document.

    A document is for validation if the first 64 bits of `DocumentPiece.digest` (if empty, of the SHA-256 of its text) are below
    `val_fraction * 2**64`. An unreadable document has no ids; if only part of a document is unreadable, its other pieces are
    written. Calls run in threads: `tokenizers` and tiktoken release the GIL while they encode.
    """

    def __init__(self, tokenizer: Tokenizer, params: PrepareParams, bos_ids: Sequence[int] = ()) -> None:
        self.params = params
        self._encode = fast_encoder(tokenizer) or tokenizer.encode
        self._end = np.array([tokenizer.eos_id], token_dtype(tokenizer.vocab_size))
        self._bos = np.array(bos_ids, self._end.dtype)
        self._val_below = int(params.val_fraction * 2.0**64)

    def __call__(self, pieces: Sequence[DocumentPiece]) -> list[EncodedPiece]:
        """Encode pieces."""
        return [self.encoded(piece) for piece in pieces]

    def encoded(self, piece: DocumentPiece) -> EncodedPiece:
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
        return EncodedPiece(
            ids=self._delimited(piece, ids).tobytes(),
            split=self._split(piece.digest or own_digest),
            size=len(data),
            first=piece.first,
            read=piece.read,
            skipped=skipped,
            file=piece.file,
            lost=piece.lost,
            identity=own_digest if piece.first and piece.last else piece.identity,
            is_short=is_short(piece, text, self.params),
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


def _skipped_document(piece: DocumentPiece, skipped: str) -> EncodedPiece:
    """Return the result for a document that is skipped with an error."""
    return EncodedPiece(
        ids=b"",
        split="train",
        size=0,
        first=False,
        read=piece.read,
        skipped=skipped,
        file=piece.file,
        lost=piece.lost,
    )


def batches_of(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
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


def in_order(
    encode: Callable[[Sequence[DocumentPiece]], list[EncodedPiece]],
    batches: Iterator[list[DocumentPiece]],
    workers: int,
) -> Generator[list[EncodedPiece]]:
    """Encode batches in threads, a few batches ahead; yield results in the order of the batches."""
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
