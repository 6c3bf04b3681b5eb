"""The course: quoted data matches its source, and the named tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import repository
from tokenizers import ByteLevelBPETokenizer

PAGES = sorted((repository() / "docs" / "course").glob("*.md"))


def cells(page: Path) -> list[str]:
    """Return the code of a page, without options of cells."""
    found = re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", page.read_text("utf-8"), flags=re.M | re.S)
    return [re.sub(r"\A(:\w+:.*\n)+\n?", "", cell) for cell in found]


def test_the_text_of_the_first_page_is_the_beginning_of_tinyshakespeare(data_dir: Path) -> None:
    whole = (data_dir / "tinyshakespeare.txt").read_text("utf-8")
    first, *_ = cells(repository() / "docs" / "course" / "text.md")
    [written] = re.findall(r'^text = """\\\n(.*?)"""$', first, flags=re.M | re.S)
    assert written == whole[:500]
    [rest] = re.findall(r'^alphabet = "(.*?)" \+', first, flags=re.M)
    letters = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert set(rest.replace(r"\n", "\n")) | letters == set(whole)


def test_the_ids_of_the_prompt_are_those_of_gpt2(data_dir: Path) -> None:
    text = (repository() / "docs" / "course" / "gpt2.md").read_text("utf-8")
    [prompt] = re.findall(r'ids of "(The quick[^"]*)"', text.replace("\n", " "))
    [ids] = re.findall(r"ids = np\.array\(\[\[([\d, ]+)\]\]\)", text)
    folder = data_dir / "gpt2-bpe"
    gpt2 = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    assert gpt2.encode(prompt).ids == [int(i) for i in ids.split(",")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tests_and_files_that_a_page_names_exist(page: Path) -> None:
    """Examples are `tests/model/test_gpt.py::test_causal_by_gradient` and `jaxgpt/train/step.py`."""
    text = page.read_text("utf-8")
    for file, test in re.findall(r"`((?:tests|jaxgpt|docs|benchmarks)/[\w/.]+)(?:::(\w+))?`", text):
        assert (repository() / file).exists(), file
        assert not test or f"\ndef {test}(" in (repository() / file).read_text("utf-8"), f"{file}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_cells_of_a_page_compile(page: Path) -> None:
    for i, cell in enumerate(cells(page)):
        compile(cell, f"{page.stem}[{i}]", "exec")
