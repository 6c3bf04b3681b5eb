"""Names: a class name belongs to one class, and `report` and `Progress` have one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict

from helpers import repository

FILES = sorted((repository() / "jaxgpt").rglob("*.py"))


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_report_is_a_description_of_data() -> None:
    """A run passes its events to a listener, and work its progress to a `Progress`: neither is a report."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = ""
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                name = node.name
            if name.lower() in ("report", "reports"):
                found.append(f"{path.name}: {name}")
    modules = [path.relative_to(repository()).as_posix() for path in FILES if "report" in path.stem]
    assert (found, modules) == ([], ["jaxgpt/cli/data_report.py"])


def test_every_progress_is_of_the_one_type() -> None:
    """The type of an argument named `progress` is `Progress`; `generate` accepts any function of two numbers."""
    types = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.arg) and node.arg == "progress" and node.annotation:
                types.add(ast.unparse(node.annotation))
    assert types == {"Progress", "Callable[[int, int], None] | None"}
