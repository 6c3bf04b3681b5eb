"""Read documents in a fixed order and bounded memory, from files and Hugging Face datasets.

The suffix determines the format. `.jsonl`, `.ndjson`: one document per line, a JSON object; `.parquet`: one document per row;
`.json`: an error. Any other file is one document of UTF-8 text. Text and JSON Lines may be compressed: `.gz`, `.xz`, `.bz2`.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxgpt.config import PrepareParams
from jaxgpt.data.cuts import GPT2_CUTS, Cuts, cut
from jaxgpt.data.text import visible_files
from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.files import missing, parse_json
from jaxgpt.hub import download

HUB = "hf:"  # prefix of the name of a Hugging Face dataset
OPEN: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
LINES = (".jsonl", ".ndjson")
FILES = [f"*{kind}{packed}" for kind in (".txt", *LINES) for packed in ("", *OPEN)] + ["*.parquet"]  # default patterns
BLOCK = 1 << 20  # characters of a text file to read at a time; buffer size of a Parquet file in bytes
ROWS = 64  # rows of a Parquet file to read at a time
UNCUT = 1 << 21  # maximum characters of a text file without a safe cut; encoding them takes 0.4 GB
TRAIN = b"\xff" * 32  # digest assigned to the first document; selects training for any `val_fraction`
CONVERT = "convert it to UTF-8 text, JSON Lines (.jsonl) or Parquet (.parquet)"


class Source(NamedTuple):
    """A file, a directory or a Hugging Face dataset."""

    name: str  # path or `hf:OWNER/NAME[/PATTERN]`, as given
    files: tuple[Path, ...]  # sorted, without empty files
    size: int  # total bytes on disk
    fingerprint: str  # SHA-256 of names, sizes and modification times of the files


class Piece(NamedTuple):
    """A document, or part of a text file. Workers call `text` to parse it."""

    where: str  # file, and line or row, for messages
    content: str | bytes | UserError | None  # text or JSON object; error of an unreadable document; None: Parquet null
    field: str = ""  # field with the text in the JSON object; empty: the content is the text
    first: bool = True  # whether the document starts with this piece
    last: bool = True  # whether the document ends with this piece
    digest: bytes = b""  # SHA-256 that selects the split of the document; empty: computed from the text
    read: int = 0  # bytes of the sources read from disk so far

    def text(self) -> str:
        """Parse the text; raise `UserError` if it cannot be read."""
        value: Any = self.content
        if isinstance(value, UserError):
            raise value
        if self.field:
            record = parse_json(value, self.where)
            if not isinstance(record, dict):
                raise UserError(f"{self.where}: expected an object, found {type(record).__name__}")
            if self.field not in record:
                raise UserError(
                    f"{self.where}: no field {self.field!r} in {short_repr([*record])}: choose a field with --field"
                )
            value = record[self.field]
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as e:
                raise _unreadable(self.where, e) from None
        if not isinstance(value, str):
            what = f"the field {self.field!r}" if self.field else "the text"
            raise UserError(f"{self.where}: {what} must be a string, not {short_repr(value)}")
        if "\0" in value:
            raise UserError(f"{self.where}: not text (it has a NUL): {CONVERT}")
        return value


def find_source(name: str) -> Source:
    """List non-empty files of a path or `hf:OWNER/NAME[/PATTERN]`; raise `UserError` if no file is found.

    The files of a Hugging Face dataset that match the pattern (default: `FILES`) are downloaded to the Hub's cache.
    """
    if name.startswith(HUB):
        owner, repo, pattern = [*name.removeprefix(HUB).split("/", 2), "", ""][:3]
        patterns = [pattern] if pattern else FILES
        path = download(f"{owner}/{repo}", patterns, kind="dataset")
        # The cache may also contain files of other patterns.
        files = [p for p in visible_files(path) if any(fnmatch(str(p.relative_to(path)), x) for x in patterns)]
    elif not (path := Path(name)).exists():
        raise missing(name, f"; a Hugging Face dataset is {HUB}OWNER/NAME")
    else:
        files = [*visible_files(path)] if path.is_dir() else [path]
    files = [p for p in files if p.stat().st_size]
    if not files:
        raise UserError(f"{name} has no files, or only empty files: choose a different source")
    stats = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    fingerprint = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    return Source(name, tuple(files), sum(size for _, size, _ in stats), fingerprint)


def read_pieces(sources: Sequence[Source], params: PrepareParams, cuts: Cuts) -> Iterator[Piece]:
    """Yield all documents, with long text files cut at `cuts`. The first document is always for training."""
    read = documents = 0
    for path in (path for source in sources for path in source.files):
        for piece in _read_file(path, params.field, cuts):
            documents += piece.first
            yield piece._replace(read=read + piece.read, digest=TRAIN if documents == 1 else piece.digest)
        read += path.stat().st_size


def sample_text(sources: Sequence[Source], params: PrepareParams, size: int) -> Iterator[list[str]]:
    """Yield about `size` bytes of text in pieces: the beginning of each file, in proportion to its size.

    Unreadable documents are skipped.
    """
    total = sum(source.size for source in sources)
    for path in (path for source in sources for path in source.files):
        left = size * path.stat().st_size / total
        for piece in _read_file(path, params.field, GPT2_CUTS):
            if left <= 0:
                break
            try:
                text = piece.text()
            except UserError:
                continue
            left -= len(text.encode())
            yield cut(text, GPT2_CUTS)


def _read_file(path: Path, field: str, cuts: Cuts) -> Iterator[Piece]:
    """Yield pieces of a file. The remainder of a damaged file is a single unreadable piece."""
    where, unpack = str(path), OPEN.get(path.suffix.lower())
    name = path.stem.lower() if unpack else path.name.lower()
    piece = Piece(where, "")
    try:
        with path.open("rb") as raw:
            file = unpack(raw) if unpack else raw
            if name.endswith(".parquet"):
                pieces = _read_parquet(file, where, field)
            elif name.endswith(LINES):
                pieces = _read_lines(file, where, field)
            elif name.endswith(".json"):
                raise UserError(f"{where}: a .json file is not read: write one object per line, in a .jsonl file")
            else:
                pieces = _read_text(file, where, cuts)
            for piece in pieces:
                piece = piece._replace(read=raw.tell())
                yield piece
    except Exception as e:  # any error of the reading libraries
        yield piece._replace(content=_unreadable(where, e), first=piece.last, last=True)


def _read_text(file: BinaryIO, where: str, cuts: Cuts) -> Iterator[Piece]:
    """Yield a text in pieces of about `BLOCK` characters; the digest of the first block selects the split."""
    rest, first, digest = "", True, b""
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        while block := text.read(BLOCK):
            digest = digest or hashlib.sha256(block.encode()).digest()
            *pieces, rest = cut(rest + block, cuts)
            if len(rest) > UNCUT:
                raise UserError(
                    f"{where}: {len(rest):,} characters without a place to cut them: use text with spaces or line breaks, or "
                    f"a tokenizer that splits words as GPT-2, Llama 3 or Qwen does"
                )
            if pieces:
                yield Piece(where, "".join(pieces), "", first, False, digest)
                first = False
        if rest:
            yield Piece(where, rest, "", first, True, digest)


def _read_lines(file: BinaryIO, where: str, field: str) -> Iterator[Piece]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield Piece(f"{where}, line {number}", line, field)


def _read_parquet(file: BinaryIO, where: str, field: str) -> Iterator[Piece]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{where} needs the package pyarrow: pip install 'jaxgpt[data]'") from None
    table = parquet.ParquetFile(file, buffer_size=BLOCK)
    if field not in (names := table.schema_arrow.names):
        raise UserError(f"{where} has no column {field!r}: choose one of {short_repr(names)} with --field")
    number = 0
    for batch in table.iter_batches(ROWS, columns=[field]):
        for value in batch.column(0).cast("binary").to_pylist():  # bytes, for the UTF-8 check in `Piece.text`
            yield Piece(f"{where}, row {number}", value)
            number += 1


def _unreadable(where: str, e: Exception) -> UserError:
    if isinstance(e, UserError):
        return e
    if isinstance(e, UnicodeDecodeError):
        return UserError(f"{where}: not UTF-8 text: {CONVERT}")
    return UserError(f"cannot read {where}: {one_line(getattr(e, 'strerror', None) or e) or type(e).__name__}")
