"""Where text comes from, and what is no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxgpt.config import DataConfig, UserError
from jaxgpt.data import load_dataset
from jaxgpt.data.corpus import PYTHON_MODULES, python_sources, read_path, read_text
from jaxgpt.presets import preset


def test_tinyshakespeare(data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The published facts, from a copy in the cache."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tinyshakespeare.txt").write_bytes((data_dir / "tinyshakespeare.txt").read_bytes())
    data = load_dataset(preset("nanogpt-cpu"))
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


def test_pythons_own_sources_are_plain_and_many() -> None:
    text = python_sources()
    assert sorted(PYTHON_MODULES) == PYTHON_MODULES
    assert len(text.text) > 2_000_000
    assert sorted(set(text.text)) == ["\n", *map(chr, range(32, 127))]
    assert "modules of Python's standard library, abc to zipapp" in text.source


def test_a_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=f"not at {tmp_path}.*--data.path FILE"):
        python_sources()


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, text in (("a.txt", "one"), ("b/c.txt", "two"), ("z.txt", "three"), (".git/x", "no"), (".y", "no")):
        (folder / name).write_text(text)
    assert read_path(folder).text == "onetwothree"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("image.png", b"\x89PNG\xff\xfe", "image.png is not UTF-8 text"),
        ("zeros.txt", b"a\0b", "zeros.txt is not text"),
    ],
)
def test_what_is_no_text(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_path(tmp_path / name)


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder: nowhere"):
        read_path(Path("nowhere"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="no files in"):
        read_path(tmp_path / "nothing")


def test_statquest_is_two_sentences() -> None:
    data = load_dataset(preset("statquest"))
    assert data.train.take(0, 12).tolist() == [0, 1, 2, 3, 4, 3, 2, 1, 0, 3, 4, 3]
    assert not data.held_out
