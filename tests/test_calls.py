"""The call trees of docs/code.md: each function uses the names below it, and has its file and line."""

from __future__ import annotations

import ast
import inspect
import runpy
import textwrap

import pytest
from helpers import repository

CALLS = runpy.run_path(str(repository() / "docs" / "tools" / "calls.py"))


def words(name: str) -> set[str]:
    """Return the names and attributes in the source of a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(CALLS["function"](name))))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("title", CALLS["TREES"])
def test_each_function_uses_the_names_below_it(title: str) -> None:
    path: list[str] = []
    for depth, name in CALLS["calls"](CALLS["TREES"][title]):
        del path[depth:]
        word, _, full = name.rpartition(" = ")
        used = word.split(".")[-1] or full.removesuffix(".__call__").split(".")[-1]
        assert not path or used in words(path[-1]), f"{path[-1]} does not use {used}"
        path.append(name)


def test_a_tree_has_the_file_and_line_of_each_function() -> None:
    page = CALLS["insert"]((repository() / "docs" / "code.md").read_text("utf-8"))
    assert "<!-- calls" not in page
    line = next(line for line in page.splitlines() if line.startswith("train  "))
    file, number = line.split()[-1].split(":")
    assert (repository() / file).read_text("utf-8").splitlines()[int(number) - 1].startswith("def train(")
