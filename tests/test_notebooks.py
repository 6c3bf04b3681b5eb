"""The notebooks of the course are complete, and run with only the wheel of jaxgpt."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import repository
from test_course import PAGES, cells

DOCS = repository() / "docs"
NOTEBOOKS = runpy.run_path(str(DOCS / "tools" / "notebooks.py"))
COURSE = [page for page in PAGES if NOTEBOOKS["is_notebook"](page.read_text("utf-8"))]


def code(notebook: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("page", COURSE, ids=lambda page: page.stem)
def test_a_notebook_has_the_cells_and_the_text_of_its_page(page: Path) -> None:
    text = page.read_text("utf-8")
    made = NOTEBOOKS["notebook"](text, "jaxgpt-1-py3-none-any.whl")
    install, *rest = code(made)
    assert install.endswith("    %pip install -q jaxgpt-1-py3-none-any.whl")
    assert rest == [cell.strip("\n") for cell in cells(page)]
    prose = "\n".join("".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown")
    for heading in re.findall(r"^#+ .*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M):
        assert heading in prose
    assert re.findall(r"\]\([^)]*\.md|\{code-cell\}|^:tags:", prose + "".join(rest), flags=re.M) == []
    for other in re.findall(r"\]\(([^)]*)\)", prose):
        assert other.startswith("https://") or (DOCS / "course" / other.replace(".ipynb", ".md")).exists(), other
    hidden = sum(cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in made["cells"])
    assert hidden == text.count(":tags: [hide-input]")
    json.dumps(made)


def test_the_address_of_the_site_is_used_if_it_is_known() -> None:
    links = "[a](attention.md#one) [b](../models.md#chat) [c](index.md)"
    page = f"---\nfile_format: mystnb\n---\n{links}\n\n```{{code-cell}} python\n1\n```\n"
    unknown, known = (NOTEBOOKS["notebook"](page, "x.whl", base) for base in ("", "https://example.org/j/course/"))
    assert unknown["cells"][1]["source"] == ["[a](attention.ipynb) b c"]
    root = "https://example.org/j"
    assert known["cells"][1]["source"] == [
        f"[a](attention.ipynb) [b]({root}/models.html#chat) [c]({root}/course/index.html)"
    ]
    assert f"%pip install -q {root}/course/x.whl" in code(known)[0]


@pytest.mark.ci
def test_notebooks_run_with_the_wheel_alone(tmp_path: Path) -> None:
    """Run each notebook in a fresh kernel, outside of the repository."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("setuptools", minversion="77")
    written = NOTEBOOKS["write"](DOCS / "course", tmp_path / "course")
    assert [path.stem for path in written] == [page.stem for page in COURSE]
    [wheel] = (tmp_path / "course").glob("*.whl")
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(target)}
    for name in ("text", "embeddings"):
        notebook = nbformat.read(tmp_path / "course" / f"{name}.ipynb", as_version=4)
        nbformat.validate(notebook)
        notebook.cells.append(nbformat.v4.new_code_cell("print(jaxgpt.__file__)"))
        client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
        client.execute(cwd=str(tmp_path), env=env)
        assert notebook.cells[-1].outputs[0].text.startswith(str(target))
