"""Formats of files with documents: the same documents in every form that users bring."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.config import PrepareParams
from jaxgpt.data.files import json_documents
from jaxgpt.data.files.json_documents import array_items, json_layout
from jaxgpt.data.files.records import read_records
from jaxgpt.data.files.streams import open_streams
from jaxgpt.data.prepared.documents import read_pieces
from jaxgpt.data.prepared.sources import find_source
from jaxgpt.errors import UserError

RECORDS = [{"text": f'document {i}: "{{[é,\\"东'} for i in range(30)]
TEXTS = [record["text"] for record in RECORDS]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()
ARRAY = json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()


def texts(name: str, **options: Any) -> list[str]:
    pieces = read_pieces([find_source(name)], PrepareParams(**options), None)
    return [piece.text() for piece in pieces]


def zstd(data: bytes) -> bytes:
    try:
        from compression import zstd as library
    except ImportError:
        library = pytest.importorskip("backports.zstd")
    compressed: bytes = library.compress(data)
    return compressed


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress, zstd])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.X", LINES),
        ("a.json.X", LINES),
        ("a.json.X", ARRAY),
        ("a.jsonl", LINES),  # compressed, but the name does not show it
        ("a.json", ARRAY),
        ("A.NDJSON.X", b"\xef\xbb\xbf" + LINES),
    ],
)
def test_compressed_documents(name: str, data: bytes, compress: Callable[[bytes], bytes]) -> None:
    suffix = {gzip.compress: "gz", lzma.compress: "xz", bz2.compress: "bz2", zstd: "zst"}[compress]
    path = name.replace("X", suffix)
    Path(path).write_bytes(compress(data))
    assert texts(path) == TEXTS


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_compressed_text_with_any_name(compress: Callable[[bytes], bytes]) -> None:
    Path("a.txt").write_bytes(compress("one\n東京\n".encode()) + compress(b"two"))
    assert texts("a.txt") == ["one\n東京\ntwo"]


STREAMS = {
    "streams": lambda one: one(b"a\n") + one(b"") + one(b"b\n") + one(b"c\n"),
    "padding between streams": lambda one: one(b"a\nb\n") + b"\0" * 4 + one(b"c\n"),
    "padding at the end": lambda one: one(b"a\nb\nc\n") + b"\0" * 512,
}


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress, zstd])
@pytest.mark.parametrize("case", STREAMS)
def test_streams_of_a_compressed_file(case: str, compress: Callable[[bytes], bytes]) -> None:
    suffix = {gzip.compress: "gz", lzma.compress: "xz", bz2.compress: "bz2", zstd: "zst"}[compress]
    Path(f"a.txt.{suffix}").write_bytes(STREAMS[case](compress))
    assert texts(f"a.txt.{suffix}") == ["a\nb\nc\n"]


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress, zstd])
def test_a_damaged_later_stream_is_an_error(compress: Callable[[bytes], bytes]) -> None:
    """The readers of Python end silently where the header of a stream is damaged."""
    suffix = {gzip.compress: "gz", lzma.compress: "xz", bz2.compress: "bz2", zstd: "zst"}[compress]
    for end in (b"X" + compress(b"b\n")[1:], compress(b"b\n")[:-3], b"X"):
        Path(f"a.txt.{suffix}").write_bytes(compress(b"a\n") + end)
        with pytest.raises(UserError, match=rf"cannot read a.txt.{suffix}: "):
            texts(f"a.txt.{suffix}")


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2", "zst"])
def test_a_file_of_zeros_is_an_error(suffix: str) -> None:
    """A failed download may have space reserved for it. To the format .lzma, zeros are an empty file."""
    if suffix == "zst":
        zstd(b"")  # skip without the package
    Path(f"a.txt.{suffix}").write_bytes(b"\0" * 1000)
    with pytest.raises(UserError, match=rf"cannot read a.txt.{suffix}: "):
        texts(f"a.txt.{suffix}")


@settings(max_examples=50)
@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    st.lists(st.integers(0, 900), max_size=6),
    st.integers(1, 64),
)
def test_seeking_in_streams(parts: list[bytes], places: list[int], size: int) -> None:
    data = b"".join(parts)
    with open_streams(io.BytesIO(b"".join(map(lzma.compress, parts))), lzma.LZMADecompressor) as file:
        for place in places:
            assert file.seek(place) == min(place, len(data))
            assert file.read(size) == data[place : place + size]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xef\xbb\xbf\n " + ARRAY + b"\n", TEXTS),
        (b"\n\n" + LINES, TEXTS),
        (b'{\n  "text": "one object"\n}\n', ["one object"]),
        (b'{"text": "one"}', ["one"]),
        (b"[]", []),
        (b"\n", []),
    ],
)
def test_layouts_of_json_files(data: bytes, expected: list[str]) -> None:
    Path("a.json").write_bytes(data)
    assert texts("a.json") == expected


def test_an_array_in_one_line_is_read_in_parts() -> None:
    """Neither the layout nor the first item needs the whole line in memory."""
    Path("a.json").write_text("[" + ", ".join(['{"text": "' + "a" * 1000 + '"}'] * 5000) + "]")
    tracemalloc.start()
    with Path("a.json").open("rb") as file:
        assert json_layout(file) == "array"
    record = next(read_records(Path("a.json"), ["text"]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.value["text"] == "a" * 1000
    assert peak < 1e6


def test_a_parquet_file_with_any_name() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS}), "a.parquet")
    Path("a.parquet").rename("part-0")
    assert texts("part-0") == TEXTS
    Path("b.txt").write_text("PAR1 is a text")
    assert texts("b.txt") == ["PAR1 is a text"]


def test_two_columns_of_one_name_are_ambiguous() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has 2 columns 'text': rename one"):
        texts("a.parquet")


@pytest.mark.parametrize(
    ("value", "kind"), [(1, "int64"), (["a"], "list<.*string>"), ({"a": "b"}, "struct<a: string>")]
)
def test_a_column_of_other_values_than_text_is_named_with_its_type(value: Any, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [value]}), "a.parquet")
    with pytest.raises(
        UserError, match=rf"cannot read a\.parquet: the column 'text' has the type {kind}, not text: choose"
    ):
        texts("a.parquet")


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_missing_library_is_no_damage_of_a_file(on_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backports", "compression"):
        monkeypatch.setitem(sys.modules, name, None)
    Path("a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd\x24")
    with pytest.raises(UserError, match=r"a\.txt\.zst needs the package backports\.zstd: pip install 'jaxgpt\[data\]'"):
        texts("a.txt.zst", on_error=on_error)


STRINGS = st.text('"\\[]{},a\u6771', max_size=4)
VALUES = st.none() | st.integers(0, 99) | STRINGS
JSON = (
    VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(STRINGS, VALUES | st.lists(STRINGS, max_size=2), max_size=2)
)


@settings(max_examples=60)
@given(st.lists(JSON, max_size=4), st.integers(1, 40), st.sampled_from([None, 1]))
def test_an_array_is_split_into_its_items(items: list[Any], chunk: int, indent: int | None) -> None:
    """The items equal the result of the JSON parser, for any size of the reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_documents, "CHUNK", chunk)
        file = io.BytesIO(json.dumps(items, indent=indent).encode())
        assert [json.loads(item) for item in array_items(file)] == items


def test_text_after_an_array_is_an_error() -> None:
    Path("a.json").write_bytes(ARRAY + b"[]")
    with pytest.raises(UserError, match="text after the end of the array"):
        texts("a.json")


def test_a_long_item_is_read_in_linear_time() -> None:
    """The reads grow with the item, so each byte is scanned a few times."""

    class Counting(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            return super().read(size)

    letters = random.Random(0).choices("abc", k=1000)
    file = Counting(json.dumps([{"text": "".join(letters) * 3000}]).encode())
    [item] = array_items(file)
    assert len(json.loads(item)["text"]) == 3_000_000
    assert file.reads < 20
