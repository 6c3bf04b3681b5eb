"""The pages of docs/ whose Python blocks run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from helpers import repository


@pytest.mark.parametrize("page", ["python.md"])
def test_the_blocks_of_a_page_run_one_after_the_other(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the line numbers of the page."""
    text = (repository() / "docs" / page).read_text()
    parts = re.split(r"^```(?:python)?\n", text, flags=re.M)
    blocks = [part if i % 2 else "\n" * part.count("\n") for i, part in enumerate(parts)]
    Path("page.py").write_text("\n".join(blocks))
    runpy.run_path("page.py")
    assert "brown fox jumps" in capsys.readouterr().out
