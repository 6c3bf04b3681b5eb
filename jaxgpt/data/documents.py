"""Read documents in bounded memory: text files, folders, JSON Lines, Parquet and Hugging Face datasets, in a fixed order."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from jaxgpt.data.corpus import NotText, is_hidden
from jaxgpt.data.hub import reachable
from jaxgpt.data.kinds import HEAD, JSON_LINES, Kind, kind_of
from jaxgpt.data.pieces import Find, cut
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import JSON_BYTES, parse_json

BLOCK = 1 << 20  # bytes of documents in a chunk
LONGEST = JSON_BYTES  # bytes of a document that is not a text file of its own
UNCUT = 1 << 21  # characters of a document without a place to cut it; to encode them takes up to 0.4 GB
ROWS = 16  # rows of a table to read at once
HUB = "hf:"  # prefix of the name of a Hugging Face dataset
OPEN: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
COMPRESSED = (*OPEN, ".zst", ".zstd")

Document = tuple[str, "str | UserError"]  # its place, such as "a.jsonl, line 3", and its text or why it cannot be read


class Cursor(NamedTuple):
    """A position between two documents, or between two parts of a long text file.

    Attributes:
        file: index of the file among all files of all sources.
        row: lines or rows of the file that come before; characters if it is a text file.
    """

    file: int
    row: int


START = Cursor(0, 0)


@dataclass(frozen=True)
class File:
    """A file of a source, or a Hugging Face dataset.

    Attributes:
        source: index of the source.
        name: name for messages.
        size: bytes on disk; 0 if unknown.
        path: where it is; None: a Hugging Face dataset.
    """

    source: int
    name: str
    size: int
    path: Path | None


@dataclass(frozen=True)
class Source:
    """One of the sources given by the user.

    Attributes:
        name: path or `hf:NAME`, as given.
        files: number of files; 0 for a Hugging Face dataset.
        size: bytes on disk; 0 for a Hugging Face dataset.
        fingerprint: hash of the names, sizes and modification times of the files, or the revision of a dataset.
    """

    name: str
    files: int
    size: int
    fingerprint: str


@dataclass(frozen=True)
class Table:
    """How to find the documents of JSON Lines, Parquet and Hugging Face datasets.

    Attributes:
        field: field or column with the text.
        subset: subset (configuration) of a Hugging Face dataset; empty: the default one.
        split: split of a Hugging Face dataset.
    """

    field: str = "text"
    subset: str = ""
    split: str = "train"


class Payload(Protocol):
    """Unparsed documents, as sent to a worker."""

    def documents(self) -> Iterator[Document]:
        """Parse the documents."""
        ...


class Span(NamedTuple):
    """Where the documents of a chunk are.

    Attributes:
        source: index of the source.
        begin: cursor before them.
        end: cursor after them.
        read: bytes of all files read so far.
    """

    source: int
    begin: Cursor
    end: Cursor
    read: int


class Chunk(NamedTuple):
    """Consecutive documents of one source, to be processed at once."""

    payload: Payload
    span: Span


@dataclass(frozen=True)
class Lines:
    """Whole lines of a JSON Lines file; `first` is the number of the first one."""

    name: str
    first: int
    data: bytes
    field: str

    def documents(self) -> Iterator[Document]:
        for number, line in enumerate(self.data.split(b"\n"), self.first):
            if line.strip():
                place = f"{self.name}, line {number}"
                yield place, _caught(place, _field, line, self.field)


@dataclass(frozen=True)
class Rows:
    """Rows of a table; None: the text is missing, bytes: it is not UTF-8. `first` is the number of the first one, from 0."""

    name: str
    first: int
    texts: Sequence[Any]
    field: str

    def documents(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts, self.first):
            place = f"{self.name}, row {number}"
            yield place, _caught(place, _checked, text, self.field)


@dataclass(frozen=True)
class Files:
    """Whole text files: names and contents."""

    files: Sequence[tuple[str, bytes]]

    def documents(self) -> Iterator[Document]:
        for name, data in self.files:
            try:
                _check_kind(name, data)
                text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
                yield name, _caught(name, _checked, text, "")
            except UnicodeDecodeError as e:
                yield name, UserError(f"{name}: not UTF-8 (byte {e.start})")
            except UserError as e:
                yield name, e


@dataclass(frozen=True)
class Part:
    """Part of a text file that is longer than a chunk.

    Attributes:
        name: name of the file.
        pieces: consecutive pieces of text, cut where that does not change the ids.
        first: whether the file begins here.
        last: whether the file ends here.
        digest: SHA-256 of the whole text in UTF-8.
    """

    name: str
    pieces: Sequence[str]
    first: bool
    last: bool
    digest: bytes

    def documents(self) -> Iterator[Document]:
        yield self.name, "".join(self.pieces)


@dataclass(frozen=True)
class Unreadable:
    """A document, or the rest of a file, that cannot be read."""

    place: str
    error: UserError

    def documents(self) -> Iterator[Document]:
        yield self.place, self.error


def list_sources(names: Sequence[str], table: Table) -> tuple[list[Source], list[File]]:
    """List the files of sources, sorted by name within each folder.

    Raises:
        UserError: a source does not exist, or has no files.
    """
    sources, files = list[Source](), list[File]()
    for name in names:
        index = len(sources)
        if name.startswith(HUB):
            sources.append(Source(name, 0, 0, _revision(name.removeprefix(HUB), table)))
            files.append(File(index, name, 0, None))
            continue
        path = Path(name)
        if not path.exists():
            near = f"; for a Hugging Face dataset: {HUB}{name}" if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else ""
            raise UserError(f"no such file or folder: {name}{near}")
        found = _list_files(path)
        if not found:
            raise UserError(f"{name} contains no files")
        sizes = [file.stat().st_size for file in found]
        files += [File(index, str(file), size, file) for file, size in zip(found, sizes, strict=True)]
        sources.append(Source(name, len(found), sum(sizes), _fingerprint(path, found)))
        if not sum(sizes):
            raise UserError(f"{name} is empty")
    return sources, files


def read_chunks(files: Sequence[File], table: Table, find: Find, start: Cursor = START) -> Iterator[Chunk]:
    """Read all documents from a cursor on.

    Short text files are read many at once, and long ones in parts. The concatenation of all documents does not depend on
    how they are divided into chunks.

    Args:
        files: what `list_sources` returned.
        table: where the text of a row is.
        find: finds places to cut a text (`Tokenizer.find`).
        start: where to begin.
    """
    read, group = sum(file.size for file in files[: start.file]), list[tuple[str, bytes]]()
    begin = start

    def flush(end: int) -> Iterator[Chunk]:
        nonlocal group, begin
        if group:
            yield Chunk(Files(group), Span(files[begin.file].source, begin, Cursor(end, 0), read))
        group, begin = [], Cursor(end, 0)

    for index, file in enumerate(files):
        if index < start.file:
            continue
        row = start.row if index == start.file else 0
        small = _read_small(file, table.field) if not row else None
        if begin.file < index and files[begin.file].source != file.source:
            yield from flush(index)
        if isinstance(small, bytes):
            read += file.size
            if small:  # an empty file holds no document
                group.append((file.name, small))
            if sum(len(data) for _, data in group) >= BLOCK:
                yield from flush(index + 1)
            continue
        yield from flush(index)
        before = Cursor(index, row)
        payloads = _read(file, table, find, row)
        while True:
            try:
                payload, rows, at = next(payloads)
            except StopIteration:
                break
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as e:
                # The message alone: an error of a subclass, such as NotText, cannot be unpickled in a worker.
                error = UserError(str(e) if isinstance(e, UserError) else f"cannot read {file.name}: {_reason(e)}")
                span = Span(file.source, before, Cursor(index + 1, 0), read + file.size)
                yield Chunk(Unreadable(file.name, error), span)
                break
            ended = isinstance(payload, Part) and payload.last
            end = Cursor(index + 1, 0) if ended else Cursor(index, rows)
            yield Chunk(payload, Span(file.source, before, end, read + at))
            before = end
        read += file.size
        begin = Cursor(index + 1, 0)
    yield from flush(len(files))


def sample_text(files: Sequence[File], table: Table, find: Find, size: int, skip: bool) -> Iterator[Sequence[str]]:
    """Read about `size` bytes of text: from the start of each file, in proportion to its size on disk.

    Args:
        files: what `list_sources` returned.
        table: where the text of a row is.
        find: finds places to cut a text.
        size: bytes, or all text if there is less.
        skip: leave out unreadable documents instead of raising an error.
    """
    sizes = [file.size if file.path else size for file in files]  # that of a dataset is not known
    for file, share in zip(files, sizes, strict=True):
        left = size * share / max(sum(sizes), 1)
        for chunk in read_chunks([file], table, find):
            texts = list[str]()
            for _, text in chunk.payload.documents():
                if isinstance(text, str):
                    texts += cut(text, find)
                elif not skip:
                    raise text
            yield texts
            left -= sum(len(text.encode()) for text in texts)
            if left <= 0:
                break


def check_cuts(pieces: Sequence[str]) -> UserError | None:
    """Return an error if one of the pieces of a document is too long to be encoded in bounded memory."""
    longest = max(map(len, pieces), default=0)
    if longest <= UNCUT:
        return None
    return UserError(
        f"{longest:,} characters without a place to cut them for the tokenizer: use text with spaces or line breaks, or a "
        f"tokenizer with the words of GPT-2, Llama 3 or Qwen"
    )


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and not is_hidden(p.relative_to(path)))


def _fingerprint(root: Path, files: Sequence[Path]) -> str:
    hashed = hashlib.sha256()
    for file in files:
        stat = file.stat()
        hashed.update(json.dumps([str(file.relative_to(root)), stat.st_size, stat.st_mtime_ns]).encode())
    return hashed.hexdigest()


def _stem(path: Path) -> str:
    """Return the name of a file in lower case, without the suffix of a compressed file."""
    name = path.name.lower()
    return name[: -len(path.suffix)] if path.suffix.lower() in COMPRESSED else name


def _holds_lines(path: Path, field: str) -> bool:
    """Return whether a file is JSON Lines: by its name, or if that ends in .json, by the field in its first line."""
    if not _stem(path).endswith(".json"):
        return _stem(path).endswith(JSON_LINES)
    match next(_read_lines(path, path.name, field, 0), None):
        case Lines(data=data), _, _:
            with suppress(UserError):
                record = parse_json(data.split(b"\n", 1)[0], path.name)
                return isinstance(record, dict) and field in record
    return False


def _read_small(file: File, field: str) -> bytes | None:
    """Read a text file that is no longer than a chunk; None: it is another kind of file, or longer."""
    if file.path is None or file.size > BLOCK or file.path.suffix.lower() in (*COMPRESSED, ".parquet"):
        return None
    try:
        return None if _holds_lines(file.path, field) else file.path.read_bytes()
    except OSError:
        return None  # `_read` reports it


def _read(file: File, table: Table, find: Find, row: int) -> Iterator[tuple[Payload, int, int]]:
    """Yield payloads of a file, each with the rows of the file up to its end and the bytes read so far."""
    if file.path is None:
        yield from _read_dataset(file, table, row)
    elif file.path.suffix.lower() == ".parquet":
        yield from _read_parquet(file.path, file.name, table.field, row)
    elif _holds_lines(file.path, table.field):
        yield from _read_lines(file.path, file.name, table.field, row)
    else:
        yield from _read_text(file.path, file.name, find, row)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file, decompressing it by its suffix; also return a function that counts the bytes read from disk."""
    with path.open("rb") as raw:
        stream: Any = raw
        suffix = path.suffix.lower()
        if suffix in OPEN:
            stream = OPEN[suffix](raw)
        elif suffix in (".zst", ".zstd"):
            arrow = _arrow(path)
            stream = arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd")
        yield stream, raw.tell


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: pip install 'jaxgpt[data]'") from None
    return pyarrow


def _read_lines(path: Path, name: str, field: str, row: int) -> Iterator[tuple[Payload, int, int]]:
    """Yield blocks of whole lines. A line longer than `LONGEST` is reported and read over."""
    held, length, done = list[bytes](), 0, 0
    with _opened(path) as (stream, position):
        while True:
            block = stream.read(BLOCK)
            at = block.rfind(b"\n") + 1
            if not at and block:  # within a line
                length += len(block)
                held = [*held, block] if length <= LONGEST else []
                continue
            head, rest = block[:at], block[at:]
            if length > LONGEST:  # the end of a line that is too long
                end = head.find(b"\n") + 1
                head = head[end:]
                if done >= row:
                    error = UserError(f"{name}, line {done + 1} is longer than {LONGEST:,} bytes: shorten it")
                    yield Unreadable(f"{name}, line {done + 1}", error), done + 1, position()
                done += 1
            else:
                head = b"".join([*held, head])
            held, length = [rest], len(rest)
            lines = head.count(b"\n") + (not block and not head.endswith(b"\n") and head != b"")
            skipped = min(max(row - done, 0), lines)
            if skipped < lines:
                data = head.removeprefix(codecs.BOM_UTF8) if not done else head
                data = data if not skipped else data.split(b"\n", skipped)[-1]
                yield Lines(name, done + skipped + 1, data, field), done + lines, position()
            done += lines
            if not block:
                return


def _read_parquet(path: Path, name: str, field: str, row: int) -> Iterator[tuple[Payload, int, int]]:
    _arrow(path)
    from pyarrow import parquet

    with path.open("rb") as raw:
        file = parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        if field not in file.schema_arrow.names:
            raise UserError(
                f"{name} has no column {field!r}: name one of {short_repr(file.schema_arrow.names)} with --field"
            )
        counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        done, first = 0, 0
        while first < len(counts) and done + counts[first] <= row:
            done, first = done + counts[first], first + 1
        total, size = max(sum(counts), 1), path.stat().st_size
        batches = file.iter_batches(ROWS, row_groups=[*range(first, len(counts))], columns=[field])
        rows = (batch.column(0) for batch in batches)
        yield from _read_rows(name, field, map(_values, rows), done, row, lambda n: size * n // total)


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast("binary").to_pylist()


def _read_dataset(file: File, table: Table, row: int) -> Iterator[tuple[Payload, int, int]]:
    name = file.name.removeprefix(HUB)
    dataset = _load_dataset(name, table)
    if (names := dataset.column_names) is not None:
        if table.field not in names:
            raise UserError(f"{file.name} has no column {table.field!r}: name one of {short_repr(names)} with --field")
        dataset = dataset.select_columns([table.field])
    try:
        batches = ([record.get(table.field)] for record in dataset.skip(row))
        yield from _read_rows(file.name, table.field, batches, row, row, lambda n: 0)
    except UserError:
        raise
    except Exception as e:  # whatever the library and those below it raise
        raise UserError(f"cannot read {file.name}: {_reason(e)}") from None


def _read_rows(
    name: str, field: str, batches: Iterator[list[Any]], done: int, row: int, at: Callable[[int], int]
) -> Iterator[tuple[Payload, int, int]]:
    """Collect rows until they are as long as a chunk."""
    held, size = list[Any](), 0
    for values in batches:
        values, done = values[max(row - done, 0) :], done + len(values)
        for number, value in enumerate(values, done - len(values)):
            length = len(value) if isinstance(value, str | bytes) else 0
            if length > LONGEST:
                if held:
                    yield Rows(name, number - len(held), held, field), number, at(number)
                place, held, size = f"{name}, row {number}", [], 0
                error = UserError(f"{place} is longer than {LONGEST:,} characters: shorten it")
                yield Unreadable(place, error), number + 1, at(number)
                continue
            held.append(value)
            size += length + 1
            if size >= BLOCK or len(held) >= BLOCK // 64:
                yield Rows(name, number + 1 - len(held), held, field), number + 1, at(number)
                held, size = [], 0
    if held:
        yield Rows(name, done - len(held), held, field), done, at(done)


def _read_text(path: Path, name: str, find: Find, row: int) -> Iterator[tuple[Payload, int, int]]:
    """Yield a text file whole if it is short, else in parts, after a first reading that checks all of it."""
    with _opened(path) as (stream, position):
        data = stream.read(BLOCK + 1)
        if len(data) <= BLOCK:
            if data and not row:
                yield (
                    Files([(str(path.parent / _stem(path)) if _stem(path) != path.name else name, data)]),
                    1,
                    position(),
                )
            return
    _check_kind(str(path.with_name(_stem(path))), data)
    hashed = hashlib.sha256()
    for pieces, _, _ in _read_pieces(path, name, find, 0):
        for piece in pieces:
            hashed.update(piece.encode())
    for pieces, last, at in _read_pieces(path, name, find, row):
        begin, row = row, row + sum(map(len, pieces))
        yield Part(name, pieces, not begin, last, hashed.digest()), row, at


def _read_pieces(path: Path, name: str, find: Find, row: int) -> Iterator[tuple[list[str], bool, int]]:
    """Yield lists of pieces of a text from character number `row`, each with whether it is the last and the bytes read."""
    decoder, rest, done, skip, started = codecs.getincrementaldecoder("utf-8")(), "", 0, row, False
    with _opened(path) as (stream, position):
        while True:
            block = stream.read(BLOCK)
            try:
                text = decoder.decode(block, not block)
            except UnicodeDecodeError as e:
                raise UserError(f"{name}: not UTF-8 (byte {done - len(decoder.getstate()[0]) + e.start})") from None
            if "\0" in text:
                raise UserError(f"{name}: not text (NUL near byte {done + max(block.find(0), 0)})")
            done += len(block)
            if not started and text:
                text, started = text.removeprefix("\ufeff"), True
            text, skip = text[skip:], max(skip - len(text), 0)
            if not block:
                yield cut(rest + text, find), True, position()
                return
            *pieces, rest = cut(rest + text, find)
            if error := check_cuts([rest]):
                raise UserError(f"{name}: {error}")
            if pieces:
                yield pieces, False, position()


def _check_kind(name: str, data: bytes) -> None:
    if kind := kind_of(Path(name), data[:HEAD]):
        named = Kind(kind.name, "rename it to end in .parquet") if kind.name == "Parquet" else kind
        raise NotText(Path(name), named)


def _caught(place: str, parse: Callable[[Any, str], str], value: Any, field: str) -> str | UserError:
    try:
        return parse(value, field)
    except UserError as e:
        return UserError(f"{place}: {str(e).removeprefix('it: ')}")


def _field(line: bytes, field: str) -> str:
    record = parse_json(line, "it")
    if not isinstance(record, dict):
        raise UserError(f"expected an object, found {type(record).__name__}")
    if field not in record:
        raise UserError(
            f"no field {field!r}, but {short_repr(list(record))}: name the field with the text with --field"
        )
    return _checked(record[field], field)


def _checked(text: Any, field: str) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"not UTF-8 (byte {e.start})") from None
    if not isinstance(text, str):
        raise UserError(f"the field {field!r} is not a string: {short_repr(text)}")
    if "\0" in text:
        raise UserError(f"not text (NUL at character {text.index(chr(0))})")
    return text


def _reason(e: BaseException) -> str:
    lines = str(getattr(e, "strerror", None) or e).strip().splitlines()
    return lines[0] if lines else type(e).__name__


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{HUB}{name} needs the package datasets: pip install 'jaxgpt[datasets]'") from None
    return datasets


def _revision(name: str, table: Table) -> str:
    """Return the revision of a dataset, or the fingerprint of a folder; documents are read from this revision."""
    _datasets(name)
    path = Path(name)
    if path.is_dir():
        return _fingerprint(path, _list_files(path))
    from huggingface_hub import dataset_info
    from huggingface_hub.errors import HfHubHTTPError

    if not reachable():
        raise UserError(f"{HUB}{name}: no such folder, and the Hugging Face Hub cannot be reached")
    try:
        return str(dataset_info(name).sha)
    except HfHubHTTPError as e:
        status = getattr(e.response, "status_code", None)
        missing = "there is no such dataset, or it needs a login" if status in (401, 404) else _reason(e)
        raise UserError(f"{HUB}{name}: {missing}") from None
    except Exception as e:  # whatever the client's HTTP library raises, and names that are not valid
        raise UserError(f"{HUB}{name}: cannot reach the Hugging Face Hub ({_reason(e)})") from None


def _load_dataset(name: str, table: Table) -> Any:
    options = {} if Path(name).is_dir() else {"revision": _revision(name, table)}
    try:
        return _datasets(name).load_dataset(name, table.subset or None, split=table.split, streaming=True, **options)
    except UserError:
        raise
    except Exception as e:  # whatever the library and those below it raise
        raise UserError(f"cannot open {HUB}{name}: {_reason(e)}") from None
