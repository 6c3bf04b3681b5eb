"""Records of files: every format gives the same records, and damage is limited to what is damaged."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxgpt.data.files.lenient_json import Twice
from jaxgpt.data.files.records import read_records
from jaxgpt.record_files import holds_records

VALUES = [
    {"messages": [{"role": "user", "content": "Zażółć 👋"}]},
    {"prompt": "a\nb", "completion": ""},
    {"messages": [], "n": [1, {"x": -2.5}]},
]
LINES = "".join(json.dumps(value) + "\n" for value in VALUES).encode()


def read(path: Path) -> list[Any]:
    return [record.value for record in read_records(path, ["messages", "prompt", "completion", "n"])]


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.NDJSON": lambda: LINES,
    "a.json": lambda: json.dumps(VALUES).encode(),
    "bom.json": lambda: codecs.BOM_UTF8 + json.dumps(VALUES, indent=2, ensure_ascii=False).encode(),
    "lines.json": lambda: LINES,
    "array.jsonl": lambda: b"\n \n" + json.dumps(VALUES, indent=1).encode(),
    "sequence.json": lambda: "\n".join(json.dumps(value, indent=2) for value in VALUES).encode(),
    "blank.jsonl": lambda: b"\r\n\n" + LINES.replace(b"\n", b"\r\n\n"),
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.json.xz": lambda: lzma.compress(json.dumps(VALUES).encode()),
    "a.jsonl.bz2": lambda: bz2.compress(LINES),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_equal(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FORMATS[name]())
    assert read(path) == VALUES


def test_rows_of_a_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    call = {"function": {"name": "f", "arguments": '{"x": null}'}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}], "n": 1},
        {"messages": None, "n": 2},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    records = list(read_records(path, ["messages"]))
    assert [record.value for record in records] == [{"messages": rows[0]["messages"]}, {}]
    assert records[1].where == f"{path}, row 1"
    assert [record.value["n"] for record in read_records(path, ["text"])] == [1, 2], "all columns, for the message"


def test_maps_of_a_table_are_objects(tmp_path: Path) -> None:
    """Spark writes messages and arguments in this form."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    kind = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    rows = [[[("role", "user"), ("content", "Hi")]], [[("role", "user"), ("role", "system")]]]
    parquet.write_table(pyarrow.table({"messages": pyarrow.array(rows, kind)}), path)
    good, twice = read_records(path, ["messages"])
    assert good.value == {"messages": [{"role": "user", "content": "Hi"}]}
    assert twice.error.startswith("a map has a key twice (")
    assert not twice.lost


def test_a_row_that_is_not_utf_8_is_lost_alone(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts}), path)
    first, damaged, last = read_records(path, ["text"])
    assert [first.value, last.value] == [{"text": "a"}, {"text": "c"}]
    assert damaged.where == f"{path}, row 1"
    assert damaged.error.startswith("not UTF-8 text (")
    assert not damaged.lost


def test_two_columns_of_one_name_are_ambiguous(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = [pyarrow.array([text]) for text in "abcde"]
    names = ["prompt", "prompt", "completion", "id", "id"]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), path)
    [record] = read_records(path, ["prompt", "completion"])
    assert (record.error, record.lost) == ("has 2 columns 'prompt': rename one", True)
    [record] = read_records(path, ["completion"])
    assert record.value == {"completion": "c"}


def test_unread_fields_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"a": "x", "score": NaN, "big": 1e999, "long": ' + "9" * 9999 + ', "half": "\\ud83d", "b": 1, "b": 2}'
    )
    [record] = read_records(path, [])
    assert not record.error
    assert record.value["a"] == "x"
    assert math.isnan(record.value["score"])
    assert isinstance(record.value["b"], Twice)


DAMAGED: dict[str, tuple[bytes, list[int], str, bool]] = {
    "a line": (b'{"a": 1}\n{"a"\n{"a": 3}\n', [1, 3], "a.jsonl, line 2: not valid JSON (Expecting ':'", False),
    "bytes": (b'{"a": 1}\n{"a": "\xff"}\n{"a": 3}\n', [1, 3], "a.jsonl, line 2: not valid JSON ('utf-8'", False),
    "nesting": (b'{"a": 1}\n' + b"[" * 10**5 + b'\n{"a": 3}\n', [1, 3], "line 2: not valid JSON (nested", False),
    "an item": (b'[{"a": 1}, {"a"}, {"a": 3}]', [1, 3], "a.jsonl, record 2: not valid JSON (Expecting ':'", False),
    "an array without an end": (
        b'[{"a": 1},\n{"a": 2}\n',
        [1],
        "a.jsonl: the array of the .json file has no end",
        True,
    ),
    "an object in several lines": (
        b'{"a": [\n{"b": 1}\n]}\n',
        [],
        "a.jsonl, line 1: one JSON object is spread over several lines: write one object per line",
        True,
    ),
    "a first line without its end": (b'{"a": 1, "b": [\n{"a": 2}\n', [2], "a.jsonl, line 1: not valid JSON (", False),
    "an object without an end": (b'{\n"a": 1}\n{\n"a": 2', [1], "a.jsonl, record 2: not valid JSON (", True),
    "a page": (b"<html>\n", [], "a.jsonl, line 1: not valid JSON (Expecting value", False),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_one_record(name: str, tmp_path: Path) -> None:
    data, expected, error, is_lost = DAMAGED[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    records = list(read_records(path, []))
    assert [record.value["a"] for record in records if not record.error] == expected
    [bad] = [record for record in records if record.error]
    assert error in f"{bad.where}: {bad.error}"
    assert bad.lost == is_lost


def test_a_truncated_file_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES * 9999)[:-9])
    *records, last = read_records(path, [])
    assert len(records) > 1000
    assert not any(record.error for record in records)
    assert last.lost
    assert "cannot be read further" in last.error


def test_files_of_records_by_name_and_content(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.ndjson", "a.JSONL.gz", "a.parquet", "a.json.zst", "missing.jsonl.xz"):
        assert holds_records(tmp_path / name), name
    for name in ("a.txt", "a.bin", "jsonl", "a.csv", "a.txt.gz", "missing.json"):
        assert not holds_records(tmp_path / name), name
    path = tmp_path / "a.json"
    for content, expected in (
        ('[{"a": 1}]', True),
        ('\ufeff[{"a": 1}]', True),  # a byte-order mark, as Windows programs write
        ('\ufeff{"a": 1}\n{"a": 2}', True),
        ('\n[\n  {\n"a": 1}]', True),
        ('{"a": 1}\n{"a": 2}', True),
        ('{"a": "' + "x" * 99999 + '"}\n', True),
        ('{\n  "a": 1\n}', False),
        ("[1, 2]", False),
        ('"text"', False),
        ("", False),
    ):
        path.write_text(content, "utf-8")
        assert holds_records(path) == expected, content[:20]


def test_directories_of_records(tmp_path: Path) -> None:
    assert not holds_records(tmp_path)
    (tmp_path / "README.md").write_text("Data")
    (tmp_path / "info.json").write_text('{\n"a": 1}')
    assert not holds_records(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    assert holds_records(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b.txt").touch()
    assert holds_records(tmp_path)
    (tmp_path / "b.txt").touch()
    assert not holds_records(tmp_path), "a directory of text"


def test_zstandard(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    try:
        from backports import zstd
    except ImportError:
        path.write_bytes(b"\x28\xb5\x2f\xfd")
        [record] = read_records(path, [])
        assert record.error == "needs the package backports.zstd: pip install 'jaxgpt[data]'"
        return
    path.write_bytes(zstd.compress(LINES))
    assert read(path) == VALUES
