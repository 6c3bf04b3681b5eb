"""Convert course pages to notebooks that install jaxgpt and jaxgpt_course if missing.

`python -m sphinx` writes the notebooks next to the pages, with a wheel of jaxgpt and jaxgpt_course for the first cell.
With the URL of the site, which docs/conf.py derives from the URL of the repository, the first cell installs the wheel from
the site: the notebooks then run on Colab without changes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", flags=re.M | re.S)
LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+)\.md(#[\w-]+)?\)")


def is_notebook(text: str) -> bool:
    """Return whether a page has cells."""
    return text.startswith("---\nfile_format: mystnb\n")


def notebook(text: str, wheel: str, base: str = "") -> dict[str, Any]:
    """Convert a page to a notebook without outputs.

    Args:
        text: the page, in MyST Markdown.
        wheel: file name of a wheel of jaxgpt and jaxgpt_course, next to the notebook.
        base: URL of the page's directory on the site; "": unknown, so links to site pages become plain text.
    """
    where = "" if base else "\n# The wheel is next to this notebook on the site: keep both in one directory."
    install = f"""# Install jaxgpt and jaxgpt_course where jaxgpt_course is missing, such as on Colab.{where}
import importlib.util

if importlib.util.find_spec("jaxgpt_course") is None:
    %pip install -q {urljoin(base, wheel)}"""
    parts = FENCE.split(re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S))
    cells = [_cell("code", install, 0)]
    for i, part in enumerate(parts):
        if i % 2:
            options, code = re.fullmatch(r"((?:^:\w+:[^\n]*\n)*)(.*)", part, flags=re.M | re.S).groups()  # type: ignore[union-attr]
            cells.append(_cell("code", code.strip("\n"), len(cells), hidden="hide-" in options))
        elif part.strip():
            cells.append(_cell("markdown", _links(part.strip(), base), len(cells)))
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, source: str, number: int, hidden: bool = False) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
        if hidden:  # code hidden in Jupyter and Colab
            cell["metadata"] = {"jupyter": {"source_hidden": True}, "cellView": "form"}
    return cell


def _links(text: str, base: str) -> str:
    """Link course pages to their notebooks, and other pages to the site (without `base`: plain text)."""

    def link(match: re.Match[str]) -> str:
        words, page, anchor = match[1], match[2], match[3] or ""
        if "/" not in page and page != "index":
            return f"[{words}]({page}.ipynb)"
        return f"[{words}]({urljoin(base, page + '.html')}{anchor})" if base else words

    return LINK.sub(link, text)


def write(pages: Path, target: Path, base: str = "") -> list[Path]:
    """Write the wheel and the notebooks of all pages with cells, and return the paths of the notebooks.

    Args:
        pages: directory of the pages.
        target: output directory.
        base: same as in `notebook`.
    """
    target.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(target)
    written = []
    for page in sorted(pages.glob("*.md")):
        if is_notebook(text := page.read_text("utf-8")):
            written.append(target / f"{page.stem}.ipynb")
            written[-1].write_text(
                json.dumps(notebook(text, wheel, base), indent=1, ensure_ascii=False) + "\n", "utf-8"
            )
    return written


def build_wheel(target: Path) -> str:
    """Build a wheel of jaxgpt and jaxgpt_course, without a network, and return its file name."""
    for old in target.glob("jaxgpt-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        # Build from a copy: setuptools writes to the source directory and would include files of earlier builds.
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        for package in (ROOT / "jaxgpt", ROOT / "docs" / "course" / "jaxgpt_course"):
            shutil.copytree(package, Path(folder) / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
        made = subprocess.run(
            [sys.executable, "-c", code, str(target.resolve())], cwd=folder, capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise RuntimeError(
                f"no wheel of jaxgpt could be built (pip install -e '.[docs]'): {made.stderr.strip()[-500:]}"
            )
    [wheel] = target.glob("jaxgpt-*.whl")
    return wheel.name
