"""Read records from JSON Lines, JSON arrays and Parquet files, even if some of them are damaged.

A file of objects that span several lines is read completely into memory. Other formats are read one record, or one batch of
rows, at a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxgpt.data.files.compressed import HEAD, compression, inner_name, unpacked
from jaxgpt.data.files.formats import MissingPackage
from jaxgpt.data.files.json_documents import (
    SPREAD_ERROR,
    BadArray,
    array_items,
    begins_array,
    filled_lines,
    is_spread,
)
from jaxgpt.data.files.lenient_json import DECODER, decode, not_json
from jaxgpt.errors import one_line, printable

BLOCK = 1 << 20  # buffer size of a Parquet file in bytes
ROWS = 64  # rows of a Parquet file to read at a time
_SPACE = re.compile(r"[ \t\r\n]*")


class Record(NamedTuple):
    """A record of a file, or the reason why it cannot be read."""

    where: str  # file, and line, row or index, for messages
    value: Any = None  # usually a dict
    error: str = ""  # reason; empty: the record was read
    lost: bool = False  # whether the remainder of the file cannot be read either
    bytes_read: int = 0  # bytes of the file read from disk so far


def read_records(path: Path, columns: Collection[str]) -> Iterator[Record]:
    """Yield the records of a file: JSON Lines, an array or a sequence of JSON objects, or rows of a Parquet file.

    The remainder of a damaged file is a single unreadable record.

    Args:
        path: file; its content or its suffix, such as `.gz`, selects the compression, and `.parquet` selects Parquet.
        columns: columns of a Parquet file to read; if the file has none of them, all its columns are read.

    Raises:
        MissingPackage: if a library for the format is not installed; such a file is not damaged.
    """
    where = printable(str(path))
    try:
        with path.open("rb") as raw:
            suffix = compression(path.name, raw.read(HEAD))
            raw.seek(0)
            file = unpacked(raw, suffix, where)
            if inner_name(path.name, suffix).endswith(".parquet"):
                records = _read_rows(file, where, columns)
            else:
                records = _read_json(file, where)
            for record in records:
                yield record._replace(bytes_read=raw.tell())
    except MissingPackage:
        raise
    except BadArray as e:
        yield Record(where, error=str(e), lost=True)
    except Exception as e:  # any error of the reading libraries
        reason = one_line(getattr(e, "strerror", None) or e) or type(e).__name__
        yield Record(where, error=f"the file cannot be read further ({reason})", lost=True)


def _read_json(file: BinaryIO, where: str) -> Iterator[Record]:
    """Yield the items of an array, objects of several lines, or one object per line."""
    if begins_array(file):
        for index, item in enumerate(array_items(file), 1):
            yield _parsed(f"{where}, record {index}", item)
        return

    lines = filled_lines(file)
    first = next(lines, None)
    if first is None:
        return
    if first.content.strip() == b"{":
        yield from _read_objects(first.content + file.read(), where)
        return

    record = _parsed(f"{where}, line {first.number}", first.content.strip())
    if record.error and is_spread(first.content, file):
        yield record._replace(error=SPREAD_ERROR, lost=True)
        return
    yield record
    for number, line in lines:
        yield _parsed(f"{where}, line {number}", line.strip())


def _parsed(where: str, text: bytes) -> Record:
    """Parse the JSON of a record; return a `Record` with the value, or with the error."""
    try:
        return Record(where, decode(text))
    except (ValueError, RecursionError) as e:
        return Record(where, error=not_json(e))


def _read_objects(data: bytes, where: str) -> Iterator[Record]:
    """Yield consecutive objects of a text; an error ends the reading."""
    number = 1
    try:
        text = data.decode("utf-8")
        position = _skip(text, 0)
        while position < len(text):
            value, end = DECODER.raw_decode(text, position)
            yield Record(f"{where}, record {number}", value)
            number += 1
            position = _skip(text, end)
    except (ValueError, RecursionError) as e:
        yield Record(f"{where}, record {number}", error=not_json(e), lost=True)


def _skip(text: str, position: int) -> int:
    """Return the position of the next character that is not white space."""
    space = _SPACE.match(text, position)
    assert space is not None  # the pattern matches an empty text
    return space.end()


def _read_rows(file: BinaryIO, where: str, columns: Collection[str]) -> Iterator[Record]:
    """Yield the rows of a Parquet file: the columns in `columns` that the file has, or all columns if it has none of them."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingPackage(f"{where} needs the package pyarrow: pip install 'jaxgpt[data]'") from None

    table = parquet.ParquetFile(file, buffer_size=BLOCK)
    names = table.schema_arrow.names
    known = [name for name in names if name in columns]
    for name in known:
        if names.count(name) > 1:
            yield Record(where, error=f"has {names.count(name)} columns {name!r}: rename one", lost=True)
            return

    number = 0
    for batch in table.iter_batches(ROWS, columns=known or None):
        for index in range(len(batch)):
            yield _row(batch.slice(index, 1), f"{where}, row {number}")
            number += 1


def _row(batch: Any, where: str) -> Record:
    """Return the only row of a `pyarrow.RecordBatch`; maps become objects."""
    try:
        [row] = batch.to_pylist(maps_as_pydicts="strict")
    except UnicodeDecodeError as e:
        return Record(where, error=f"not UTF-8 text ({e})")
    except KeyError as e:  # a map with a key twice
        return Record(where, error=f"a map has a key twice ({one_line(e.args[0])})")
    return Record(where, without_nulls(row))


def without_nulls(value: Any) -> Any:
    """Remove null fields: the structs of a column have the fields of all rows, and null means that a field is missing."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
