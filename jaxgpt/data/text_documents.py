"""Documents of a text file, in pieces: the complete file, or the texts between separators."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxgpt.data.compressed_files import unpacked
from jaxgpt.data.cuts import Cuts, cut
from jaxgpt.data.document_piece import DocumentPiece
from jaxgpt.errors import UserError

BLOCK = 1 << 20  # characters to read at a time
UNCUT = 1 << 21  # maximum characters of a text file without a safe cut; encoding them takes 0.4 GB of memory


def read_text_pieces(
    file: BinaryIO, where: str, cuts: Cuts, separator: str, identities: Iterator[bytes]
) -> Iterator[DocumentPiece]:
    """Yield a text in pieces of about `BLOCK` characters; the digest of the first block selects the split.

    Args:
        file: the unpacked bytes of the text.
        where: path of the file, for messages.
        cuts: pattern of safe cuts.
        separator: text between documents; empty: the file is one document.
        identities: `DocumentPiece.identity` of each document with text; may end early.

    Raises:
        UserError: if more than `UNCUT` characters have no safe cut.
    """
    first = True
    rest = ""
    digest = b""  # SHA-256 of the first portion of the document
    identity = b""
    number = 1
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        for portion, is_end in _portions(text, separator):
            if first and not portion and not rest:
                continue
            if not digest:
                digest = hashlib.sha256(portion.encode()).digest()
                identity = next(identities, b"")

            # Yield the text up to the last cut; the rest follows with the next portion.
            place = f"{where}, document {number}" if separator else where
            *pieces, rest = cut(rest + portion, cuts)
            if len(rest) > UNCUT:
                raise UserError(
                    f"{place}: {len(rest):,} characters without a place to cut them: use text with spaces or line breaks, or "
                    f"a tokenizer that splits words as GPT-2, Llama 3, Qwen or SmolLM2 does"
                )
            if pieces:
                piece = "".join(pieces)
                yield DocumentPiece(place, piece, first=first, last=False, digest=digest, identity=identity)
                first = False
            if is_end:
                yield DocumentPiece(place, rest, first=first, last=True, digest=digest, identity=identity)
                first = True
                rest = ""
                digest = b""
                number += 1


def document_identities(path: Path, suffix: str, separator: str) -> Iterator[bytes]:
    """Yield the SHA-256 of each non-empty document of a file, before the pieces of the document are read.

    The generator ends at an error, which the reader of the pieces reports.
    """
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as raw, io.TextIOWrapper(unpacked(raw, suffix, ""), "utf-8-sig", newline="") as text:
            for portion, is_end in _portions(text, separator):
                digest.update(portion.encode())
                size += len(portion)
                if is_end and size:
                    yield digest.digest()
                    digest = hashlib.sha256()
                    size = 0
    except Exception:  # any error of the reading libraries
        return


def _portions(text: io.TextIOBase, separator: str) -> Iterator[tuple[str, bool]]:
    """Yield a text in portions of at most `BLOCK` characters, and whether a document ends with each portion.

    All portions of a document except the last have exactly `BLOCK` characters. Line breaks around a separator belong to no
    document.
    """
    buffer = ""
    is_begin = True  # whether the buffer is the beginning of a document
    block = text.read(BLOCK)
    while block:
        buffer += block
        documents = buffer.split(separator) if separator else [buffer]
        for document in documents[:-1]:
            document = document.rstrip("\r\n")
            yield from _ended(document.lstrip("\r\n") if is_begin else document)
            is_begin = True

        buffer = documents[-1]
        if separator and is_begin:
            buffer = _without_first_breaks(buffer, separator)
        while _has_block(buffer, separator):
            yield buffer[:BLOCK], False
            buffer = buffer[BLOCK:]
            is_begin = False
        block = text.read(BLOCK)
    if separator and is_begin:
        buffer = buffer.lstrip("\r\n")
    yield from _ended(buffer.rstrip("\r\n") if separator else buffer)


def _without_first_breaks(buffer: str, separator: str) -> str:
    """Return a buffer without the line breaks at its beginning, except those that may begin a separator at its end."""
    text = buffer.lstrip("\r\n")
    kept = max(len(text), len(separator) - 1)
    return buffer[max(len(buffer) - kept, 0) :]


def _has_block(buffer: str, separator: str) -> bool:
    """Return whether the first `BLOCK` characters of a buffer belong to its document.

    A separator may begin at the end of the buffer. The line breaks before it belong to no document.
    """
    after = len(buffer) - len(separator)
    if not separator or after <= BLOCK:
        return not separator and len(buffer) >= BLOCK
    return buffer[BLOCK:after].strip("\r\n") != ""


def _ended(document: str) -> Iterator[tuple[str, bool]]:
    """Yield the end of a document in portions; an empty document is a single empty portion."""
    for start in range(0, max(len(document), 1), BLOCK):
        yield document[start : start + BLOCK], start + BLOCK >= len(document)
