"""Sources of text, and files that are not text."""

from __future__ import annotations

import gzip
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jaxgpt.config import Config, DataConfig
from jaxgpt.data import open_data
from jaxgpt.data.builtin import PYTHON_MODULES, repeats
from jaxgpt.data.files import plain_text
from jaxgpt.data.prepared.sources import find_source
from jaxgpt.data.text import python_sources, read_path, read_text
from jaxgpt.errors import UserError
from jaxgpt.presets import preset


def test_tinyshakespeare(data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy in the cache has the published size and split."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tinyshakespeare.txt").write_bytes((data_dir / "tinyshakespeare.txt").read_bytes())
    data = open_data(preset("nanogpt-cpu"))
    assert data.characters == 1_115_394
    assert data.tokenizer.vocab_size == 65
    assert (len(data.train), len(data.val)) == (1_003_854, 111_540)
    first = [18, 47, 56, 57, 58, 1, 15, 47, 58, 47, 64, 43, 52, 10, 0, 14, 43, 44, 53, 56]
    assert data.train.take(0, 20).tolist() == first
    assert data.tokenizer.decode(first) == "First Citizen:\nBefor"


def test_offline_and_not_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.builtin.SHAKESPEARE_URL", "https://127.0.0.1:9/input.txt")
    with pytest.raises(UserError) as error:
        read_text(DataConfig(dataset="shakespeare"))
    for part in ("https://127.0.0.1:9/input.txt", "tinyshakespeare.txt", "--data.path FILE"):
        assert part in str(error.value)


def test_python_sources() -> None:
    found = python_sources()
    assert sorted(PYTHON_MODULES) == PYTHON_MODULES
    assert len(found.text) > 2_000_000
    assert sorted(set(found.text)) == ["\n", *map(chr, range(32, 127))]
    assert "modules of Python's standard library, abc to zipapp" in found.source


def test_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=f"{tmp_path}/abc.py is neither a file nor a directory"):
        python_sources()


def test_folders_are_read_in_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / ".hidden" / "texts"  # only hidden files inside the directory are skipped
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, content in (("a.txt", "one"), ("b/c.txt", "two"), ("z.txt", "three"), (".git/x", "no"), (".y", "no")):
        (folder / name).write_text(content)
    assert read_path(folder).text == "one\ntwo\nthree\n"
    (folder / "index.json").write_text("[]")  # a file that a different program uses
    assert open_data(replace(Config(), data=DataConfig(path=str(folder), train_fraction=1.0))).source.startswith(
        "4 text"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "caf\u00e9".encode("latin-1"), r"not UTF-8 text \(byte 3\): convert it"),
        ("zeros.txt", b"a" * 1000 + b"\0b", "not text"),
        ("a.JSONL", b'{"text": "hello"}\n', "jaxgpt data prepare .* --out tokens"),
        ("a.txt.gz", gzip.compress(b"hello", mtime=0), "jaxgpt data prepare .*a.txt.gz --out tokens"),
    ],
)
def test_files_that_are_not_text(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """A single file is an error; in a directory, it is skipped and counted."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} .*{message}"):
        read_path(tmp_path / name)
    with pytest.raises(UserError, match=r"no text files in .*; skipped 1 (other file|file of records)"):
        read_path(tmp_path)
    (tmp_path / "b.txt").write_text("text " * 5)
    (tmp_path / "empty.txt").touch()
    read = read_path(tmp_path)
    assert (read.data, read.files) == (b"text text text text text \n", (("b.txt", 26),))
    kinds = "1 other file and 1 file of records" if name == "a.JSONL" else "2 other files"
    assert read.source == f"1 text file in {tmp_path}; skipped {kinds}"


def test_no_text() -> None:
    with pytest.raises(UserError, match=r"no text is specified: add --data\.path FILE"):
        read_text(DataConfig(dataset="none"))


def test_the_advised_command_quotes_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my text.txt"
    path.write_text("a" * 120)
    monkeypatch.setattr(plain_text, "TEXT_BYTES", 100)
    with pytest.raises(UserError, match=re.escape(f"jaxgpt data prepare '{path}' --out tokens")):
        read_path(path)


def test_empty_and_large_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"a\.txt is empty"):
        read_path(tmp_path / "a.txt")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a" * 60)
    monkeypatch.setattr(plain_text, "TEXT_BYTES", 100)
    assert len(read_path(tmp_path / "a.txt").data) == 60
    with pytest.raises(UserError, match="more than 100 bytes of text: tokenize it with jaxgpt data prepare"):
        read_path(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\x00" * 101)
    assert read_path(tmp_path).source.endswith("; skipped 1 other file"), "a large file that is not text is skipped"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a directory"):
        read_path(tmp_path / "pipe")


def test_byte_order_marks_are_removed(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name, "utf-8-sig")
    assert read_path(tmp_path / "a.txt").text == "a.txt"
    assert read_path(tmp_path).text == "a.txt\nb.txt\n"


@pytest.mark.parametrize(
    ("name", "note"),
    [("a.json", "; JSON read as plain text"), ("a.CSV", "; CSV read as plain text"), ("a.txt", ""), ("a.py", "")],
)
def test_markup_that_becomes_text_is_reported(name: str, note: str, tmp_path: Path) -> None:
    """For example, JSON that is no records: a fine-tuned model would learn to write it."""
    path = tmp_path / name
    path.write_text('{"train": [\n{"messages": []}]}\n')
    assert read_path(path).source == f"{path}{note}"


def test_markup_in_a_directory_is_reported(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "c.csv", "d.txt"):
        (tmp_path / name).write_text('{\n "prompt": "a"}\n')
    assert read_path(tmp_path).source == f"4 text files in {tmp_path}; 2 JSON files and 1 CSV file read as plain text"


def test_the_json_beside_arrow_files_is_not_text(tmp_path: Path) -> None:
    """`datasets.save_to_disk` writes this form: the texts are in the Arrow file."""
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (tmp_path / name).write_text('{"features": {"text": "string"}}')
    for read in (read_path, lambda path: find_source(str(path))):
        for path in (tmp_path, tmp_path / "data-00000-of-00001.arrow"):
            with pytest.raises(UserError, match=r"arrow is an Arrow file .*load_from_disk\('.*'\)\.to_parquet"):
                read(path)


def test_advice_on_arrow_files_is_valid_python_for_any_path(tmp_path: Path) -> None:
    directory = tmp_path / "it's"
    directory.mkdir()
    (directory / "a.arrow").write_text("")
    with pytest.raises(UserError) as error:
        read_path(directory / "a.arrow")
    assert f'datasets.load_from_disk("{directory}").to_parquet' in str(error.value)


def test_statquest_is_two_sentences() -> None:
    data = open_data(preset("statquest"))
    assert data.train.take(0, 12).tolist() == [0, 1, 2, 3, 4, 3, 2, 1, 0, 3, 4, 3]
    assert not data.held_out


def test_repeats_are_lines_of_two_equal_halves() -> None:
    lines = repeats().splitlines()
    halves = {(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines}
    assert len(halves) == len(lines) == 20_000
    assert all(first == second for first, second in halves)
    assert {len(first) for first, _ in halves} == set(range(5, 26))
    assert lines[0] == "NvnAvOpyEVAoNGnVZQUqLU" * 2


def test_skipped_files_of_a_directory_are_named_by_their_kind(tmp_path: Path) -> None:
    (tmp_path / "ids.bin").write_bytes(b"\0\1" * 9)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("{}\n")
    with pytest.raises(
        UserError, match=r"1 other file and 1 file of records: .* rename files of token ids to train\.bin"
    ):
        read_path(tmp_path)
    (tmp_path / "LICENSE.txt").write_text("Free")
    source = read_path(tmp_path).source
    assert source.endswith(f"1 text file in {tmp_path}; skipped 1 other file and 1 file of records")
    chats.write_text('{"messages": []}\n')
    note = f"1 file of records, larger than the text (to train on records instead: --data.path {chats})"
    assert read_path(tmp_path).source == f"{source.removesuffix('1 file of records')}{note}"
