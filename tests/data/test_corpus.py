"""Sources of text, and files that are not text."""

from __future__ import annotations

import codecs
import gzip
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import DataConfig, UserError
from jaxgpt.data import corpus, open_data
from jaxgpt.data.corpus import PYTHON_MODULES, Text, decode_blocks, python_sources, read_path, read_text, repeats
from jaxgpt.presets import preset


def test_tinyshakespeare(data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The published size and split, from a copy in the cache."""
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
    monkeypatch.setattr("jaxgpt.data.corpus.SHAKESPEARE_URL", "https://127.0.0.1:9/input.txt")
    with pytest.raises(UserError) as error:
        read_text(DataConfig(dataset="shakespeare"))
    for part in ("https://127.0.0.1:9/input.txt", "tinyshakespeare.txt", "--data.path FILE"):
        assert part in str(error.value)


def test_python_sources() -> None:
    text = python_sources()
    assert sorted(PYTHON_MODULES) == PYTHON_MODULES
    assert len(text.text) > 2_000_000
    assert sorted(set(text.text)) == ["\n", *map(chr, range(32, 127))]
    assert "modules of Python's standard library, abc to zipapp" in text.source


def test_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=f"not at {tmp_path}.*--data.path FILE"):
        python_sources()


def test_folders_are_read_in_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / ".hidden" / "texts"  # only what is hidden inside the folder is left out
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, text in (("a.txt", "one"), ("b/c.txt", "two"), ("z.txt", "three"), (".git/x", "no"), (".y", "no")):
        (folder / name).write_text(text)
    assert read_path(folder).text == "onetwothree"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), r"latin.txt is not UTF-8 text \(byte 3\): .*iconv -f LATIN1"),
        ("image.png", b"\x89PNG\0\xff\xfe", "image.png is binary, not plain UTF-8 text"),
        ("zeros.txt", b"a" * 1000 + b"\0b", r"zeros.txt is not text \(NUL at byte 1000\)"),
    ],
)
def test_files_that_are_not_text(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_path(tmp_path / name)


FOREIGN = {
    "a.jsonl": (b'{"text": "hello"}\n', "JSON Lines", "jaxgpt data prepare .* --out tokens"),
    "a.JSONL": (b'{"text": "hello"}\n', "JSON Lines", "jaxgpt data prepare .* --out tokens"),
    "a.jsonl.gz": (gzip.compress(b"{}"), "gzip", "jaxgpt data prepare .*a.jsonl.gz --out tokens"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd", "Zstandard", "jaxgpt data prepare .*a.jsonl.zst --out tokens"),
    "a.txt.gz": (gzip.compress(b"hello"), "gzip", "gzip -dc .*a.txt.gz > .*a.txt$"),
    "no-suffix": (gzip.compress(b"hello"), "gzip", "gzip -dc .*no-suffix > .*no-suffix.txt$"),
    "a.parquet": (b"PAR1....PAR1", "Parquet", "jaxgpt data prepare .* --out tokens"),
    "parquet": (b"PAR1....PAR1", "Parquet", "jaxgpt data prepare .* --out tokens"),
    "a.zip": (b"PK\x03\x04....", "ZIP archive", "unzip"),
    "zip.txt": (b"PK\x03\x04....", "ZIP archive", "unzip"),
    "a.tar.gz": (gzip.compress(b"hello"), "tar archive", "tar -xf"),
    "a.tar": (b"a" * 257 + b"ustar\0", "tar archive", "tar -xf"),
    "tar": (b"a" + b"\0" * 256 + b"ustar\0", "tar archive", "tar -xf"),
    "a.npy": (b"\x93NUMPY\1", "NumPy", "tofile"),
    "a.pdf": (b"%PDF-1.7", "PDF", "pdftotext"),
    "wide.txt": ("hello".encode("utf-16"), "UTF-16", "iconv -f UTF-16"),
    "a.pt": (b"\x80\2\0", "binary", "UTF-8 text"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_errors_for_other_file_types_suggest_a_conversion(name: str, tmp_path: Path) -> None:
    """By name or content, for a single file or a folder of them."""
    content, kind, advice = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is {kind}, not plain UTF-8 text: .*{advice}"):
        read_path(tmp_path / name)
    with pytest.raises(UserError, match=f"no text files in .*: 1 {kind}; .*{advice}"):
        read_path(tmp_path)


def test_a_mixed_folder_reports_read_and_skipped_files(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.jsonl", "b.jsonl", "a.tar.gz"):
        (tmp_path / name).write_bytes(FOREIGN.get(name, FOREIGN["a.jsonl"])[0])
    (tmp_path / "__init__.py").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("x.py", "y.md"):
        (tmp_path / name).write_text(name)
    text = read_path(tmp_path)
    assert text.text == "x.pyy.md"
    assert text.source == (
        f"2 text files in {tmp_path}; skipped 1 empty, 2 JSON Lines, 1 Parquet, 1 tar archive, 1 not UTF-8"
    )


def test_byte_order_marks_are_removed(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name, "utf-8-sig")
    assert read_path(tmp_path / "a.txt").text == "a.txt"
    assert read_path(tmp_path).text == "a.txtb.txt"


@given(st.text(max_size=40), st.integers(5, 9))
def test_blocks_join_to_the_text(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", size)
        whole = Text(text.encode(), "")
        assert "".join(whole.blocks()) == text
        assert whole.characters == len(text)
        assert all(len(block.encode()) <= size for block in whole.blocks())


@given(st.binary(max_size=30), st.integers(5, 9))
def test_invalid_utf8_is_reported_with_its_position(data: bytes, size: int) -> None:
    def check(decode: Callable[[], object]) -> tuple[object, int | None]:
        try:
            return decode(), None
        except UnicodeDecodeError as e:
            return None, e.start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", size)
        assert check(lambda: "".join(text for _, text in decode_blocks(memoryview(data)))) == check(data.decode)


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder: nowhere"):
        read_path(Path("nowhere"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"no text files in .*: it is empty"):
        read_path(tmp_path / "nothing")


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


def test_large_files_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same text, checksum and errors, wherever in the file they are."""
    content = "ümläute 日本 and\r\nso on\n" * 50_000
    wrong = {"nul": content.encode() + b"a\0b" + content.encode(), "latin": content.encode() + b"\xfc "}
    (tmp_path / "a.txt").write_bytes(content.encode())
    plain = read_path(tmp_path / "a.txt")
    errors = dict[str, str]()
    for mapped in (False, True):
        monkeypatch.setattr(corpus, "MAPPED", 1 if mapped else 2**40)
        monkeypatch.setattr(corpus, "BLOCK", 1 << 14)
        text = read_path(tmp_path / "a.txt")
        assert isinstance(text.data, mmap.mmap) == mapped
        assert (text.text, text.sha256, text.characters) == (content, plain.sha256, len(content))
        assert "".join(text.blocks(8, 10_000)) == content.encode()[8:10_000].decode()
        for name, data in wrong.items():
            (tmp_path / name).write_bytes(data)
            with pytest.raises(UserError, match="not") as caught:
                read_path(tmp_path / name)
            assert errors.setdefault(name, str(caught.value)) == str(caught.value)
    (tmp_path / "bom.txt").write_bytes(codecs.BOM_UTF8 + content.encode())
    assert read_path(tmp_path / "bom.txt").text == content
