"""Read documents in a fixed order and bounded memory: text, JSON Lines, JSON, Parquet, and Hugging Face datasets.

A suffix means one thing. `.jsonl` and `.ndjson`: one object per line; `.json`: an object, or a list of objects; `.parquet`: a
table. Any other file is UTF-8 text, and one document. Text and JSON may be compressed: `.gz`, `.xz`, `.bz2`.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxgpt.data.cuts import Cuts, cut
from jaxgpt.data.text import visible_files
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import missing, parse_json

HUB = "hf:"  # prefix of the name of a Hugging Face dataset
OPEN: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
LINES = (".jsonl", ".ndjson")
BLOCK = 1 << 20  # bytes to read at a time; a longer text file becomes several pieces
ROWS = 64  # rows of a table to read at a time
UNCUT = 1 << 21  # maximum characters without a place to cut them; encoding them takes 0.4 GB
TRAIN = b"\xff" * 32  # digest of a document that is for training at any fraction for validation
CONVERT = "convert it to UTF-8 text, JSON Lines (.jsonl) or Parquet (.parquet)"


class Source(NamedTuple):
    """A file, a directory or a Hugging Face dataset."""

    name: str  # path or `hf:NAME`, as given
    files: tuple[Path, ...]  # sorted, without empty files; () for a dataset
    size: int  # bytes on disk; 0 for a dataset
    fingerprint: str  # SHA-256 of names, sizes and modification times of the files, or the revision of a dataset
    subset: str = ""  # subset (configuration) of a dataset; empty: the default subset
    split: str = ""  # split of a dataset


class Piece(NamedTuple):
    """A document, or part of a long text file. It is parsed by `text`, which runs in a worker."""

    where: str  # file, and line or row, for messages
    content: Any  # text or JSON object, parsed or in bytes; or the error of a document that cannot be read
    field: str = ""  # field of the JSON object with the text; empty: the content is the text
    first: bool = True  # whether the document starts with this piece
    last: bool = True  # whether the document ends with this piece
    digest: bytes = b""  # SHA-256 of the document; empty: not computed, because this piece is the complete document
    read: int = 0  # bytes of the sources read from disk so far

    def text(self) -> str:
        """Parse the text.

        Raises:
            UserError: if the text cannot be read.
        """
        value = self.content
        if isinstance(value, UserError):
            raise value
        if self.field:
            record = parse_json(value, self.where) if isinstance(value, bytes) else value
            if not isinstance(record, dict):
                raise UserError(f"{self.where}: expected an object, found {type(record).__name__}")
            if self.field not in record:
                raise UserError(
                    f"{self.where}: no field {self.field!r} in {short_repr([*record])}: choose one with --field"
                )
            value = record[self.field]
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as e:
                raise _unreadable(self.where, e) from None
        if not isinstance(value, str):
            raise UserError(f"{self.where}: expected a string, found {short_repr(value)}")
        _check_nul(self.where, value)
        return value


def list_sources(names: Sequence[str], subset: str, split: str) -> list[Source]:
    """List the files of each source, or the revision of a dataset.

    Args:
        names: files, directories, or names of Hugging Face datasets after `hf:`.
        subset: subset of a dataset; empty: the default subset.
        split: split of a dataset.

    Raises:
        UserError: if a source does not exist, or is empty.
    """
    return [_dataset(name, subset, split) if name.startswith(HUB) else _files(name) for name in names]


def read_pieces(sources: Sequence[Source], field: str, cuts: Cuts) -> Iterator[Piece]:
    """Yield all documents. The first document is for training.

    Args:
        sources: sources from `list_sources`.
        field: field or column with the text.
        cuts: safe places to cut a long text (`cuts_of`).
    """
    read = documents = 0
    for size, pieces in _contents(sources, field, cuts):
        for piece in pieces:
            documents += piece.first
            yield piece._replace(read=read + piece.read, digest=TRAIN if documents == 1 else piece.digest)
        read += size


def sample_text(sources: Sequence[Source], field: str, cuts: Cuts, size: int, skip: bool) -> Iterator[list[str]]:
    """Yield about `size` bytes of text, in pieces: the beginning of each file, in proportion to its size on disk.

    Args:
        sources: sources from `list_sources`.
        field: field or column with the text.
        cuts: safe places to cut a text.
        size: bytes in total. Each dataset counts as a file of this size.
        skip: skip unreadable documents instead of raising their error.
    """
    contents = list(_contents(sources, field, cuts))
    total = sum(on_disk or size for on_disk, _ in contents)
    for on_disk, pieces in contents:
        left = size * (on_disk or size) / total
        for piece in pieces:
            if left <= 0:
                break
            try:
                text = piece.text()
            except UserError:
                if not skip:
                    raise
            else:
                left -= len(text.encode())
                yield cut(text, cuts)


def check_cuts(where: str, pieces: Sequence[str]) -> None:
    """Raise `UserError` if a piece is too long to be encoded in bounded memory."""
    longest = max(map(len, pieces))
    if longest > UNCUT:
        raise UserError(
            f"{where}: {longest:,} characters without a place to cut them: use text with spaces or line breaks, or a "
            f"tokenizer with the words of GPT-2, Llama 3 or Qwen"
        )


def _contents(sources: Sequence[Source], field: str, cuts: Cuts) -> Iterator[tuple[int, Iterator[Piece]]]:
    """Yield the bytes on disk and the documents of each file or dataset."""
    for source in sources:
        if source.name.startswith(HUB):
            yield 0, _read_dataset(source, field)
        for path in source.files:
            yield path.stat().st_size, _read_file(path, field, cuts)


def _read_file(path: Path, field: str, cuts: Cuts) -> Iterator[Piece]:
    """Yield the documents of a file. If it is damaged, its remainder is a single unreadable document."""
    where, unpack = str(path), OPEN.get(path.suffix.lower())
    name = path.stem.lower() if unpack else path.name.lower()
    try:
        with path.open("rb") as raw:
            file = unpack(raw) if unpack else raw
            if name.endswith(".parquet"):
                pieces = _read_parquet(file, where, field)
            elif name.endswith(LINES):
                pieces = _read_lines(file, where, field)
            elif name.endswith(".json"):
                pieces = _read_json(file, where, field)
            else:
                pieces = _read_text(file, where, cuts)
            for piece in pieces:
                yield piece._replace(read=raw.tell())
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError) as e:
        yield Piece(where, _unreadable(where, e))


def _read_text(file: BinaryIO, where: str, cuts: Cuts) -> Iterator[Piece]:
    data = file.read(BLOCK + 1)
    if len(data) <= BLOCK:
        if data:
            yield Piece(where, data.removeprefix(codecs.BOM_UTF8))
        return
    digest, first = hashlib.sha256(), True
    for text, _ in _cut_text(file, where, cuts):  # all of it, so that an error comes before the first piece
        digest.update(text.encode())
    for text, last in _cut_text(file, where, cuts):
        yield Piece(where, text, "", first, last, digest.digest())
        first = False


def _cut_text(file: BinaryIO, where: str, cuts: Cuts) -> Iterator[tuple[str, bool]]:
    """Yield pieces of a text of about `BLOCK` characters, and whether each is the last."""
    file.seek(0)
    text, rest = io.TextIOWrapper(file, "utf-8-sig", newline=""), ""
    while block := text.read(BLOCK):
        _check_nul(where, block)
        *pieces, rest = cut(rest + block, cuts)
        check_cuts(where, [rest])
        if pieces:
            yield "".join(pieces), False
    yield rest, True
    text.detach()


def _read_lines(file: BinaryIO, where: str, field: str) -> Iterator[Piece]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield Piece(f"{where}, line {number}", line, field)


def _read_json(file: BinaryIO, where: str, field: str) -> Iterator[Piece]:
    try:
        value = parse_json(file.read().removeprefix(codecs.BOM_UTF8), where)
    except UserError as e:
        raise UserError(f"{e}: rename a file with one object per line to .jsonl") from None
    if isinstance(value, list):
        yield from (Piece(f"{where}, item {number}", item, field) for number, item in enumerate(value))
    else:
        yield Piece(where, value, field)


def _read_parquet(file: BinaryIO, where: str, field: str) -> Iterator[Piece]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{where} needs the package pyarrow: pip install 'jaxgpt[data]'") from None
    table = parquet.ParquetFile(file, buffer_size=BLOCK)
    _check_column(where, field, table.schema_arrow.names)
    number = 0
    for batch in table.iter_batches(ROWS, columns=[field]):
        for value in batch.column(0).cast("binary").to_pylist():  # bytes that are not UTF-8 are found by `Piece.text`
            yield Piece(f"{where}, row {number}", value)
            number += 1


def _read_dataset(source: Source, field: str) -> Iterator[Piece]:
    import datasets

    name = source.name.removeprefix(HUB)
    revision = {} if Path(name).is_dir() else {"revision": source.fingerprint}
    try:
        rows = datasets.load_dataset(name, source.subset or None, split=source.split, streaming=True, **revision)
        if rows.column_names is not None:
            _check_column(source.name, field, rows.column_names)
            rows = rows.select_columns([field])
        for number, row in enumerate(rows):
            yield Piece(f"{source.name}, row {number}", row.get(field))
    except Exception as e:  # any error of the libraries below datasets
        yield Piece(source.name, _unreadable(source.name, e))


def _files(name: str) -> Source:
    path = Path(name)
    if not path.exists():
        raise missing(name, f"; a Hugging Face dataset is {HUB}NAME")
    files = [p for p in (visible_files(path) if path.is_dir() else [path]) if p.stat().st_size]
    if not files:
        raise UserError(f"{name} has no files, or only empty files")
    stats = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    fingerprint = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    return Source(name, tuple(files), sum(size for _, size, _ in stats), fingerprint)


def _dataset(name: str, subset: str, split: str) -> Source:
    path = name.removeprefix(HUB)
    try:
        import datasets  # noqa: F401
        from huggingface_hub import dataset_info
    except ImportError:
        raise UserError(f"{name} needs the package datasets: pip install 'jaxgpt[datasets]'") from None
    try:
        revision = _files(path).fingerprint if Path(path).is_dir() else str(dataset_info(path, timeout=10).sha)
    except UserError:  # an empty directory
        raise
    except Exception as e:  # any error of the HTTP client, or an invalid name
        raise UserError(
            f"{name} is no directory, and cannot be read from the Hugging Face Hub ({_reason(e)})"
        ) from None
    return Source(name, (), 0, revision, subset, split)


def _check_column(where: str, field: str, names: Sequence[str]) -> None:
    if field not in names:
        raise UserError(f"{where} has no column {field!r}: choose one of {short_repr([*names])} with --field")


def _check_nul(where: str, text: str) -> None:
    if "\0" in text:
        raise UserError(f"{where}: not text (it has a NUL): {CONVERT}")


def _unreadable(where: str, e: Exception) -> UserError:
    if isinstance(e, UserError):
        return e
    if isinstance(e, UnicodeDecodeError):
        return UserError(f"{where}: not UTF-8 text: {CONVERT}")
    return UserError(f"cannot read {where}: {_reason(e)}")


def _reason(e: Exception) -> str:
    lines = str(getattr(e, "strerror", None) or e).strip().splitlines()
    return lines[0] if lines else type(e).__name__
