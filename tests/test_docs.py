"""Pages of docs/: their Python blocks run, and their paths exist."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import repository
from test_lm import tiny

import jaxgpt
from jaxgpt.config import ModelConfig
from jaxgpt.convert.families import FAMILIES
from jaxgpt.data.tokenizers.base import ByteTokenizer


@pytest.mark.ci
@pytest.mark.parametrize(
    ("page", "printed"),
    [("inside.md", "'h.1.attn.pattern': (1, 4, 19, 19)"), ("scaling.md", "(50257, 192)")],
)
def test_the_blocks_of_a_page_run_in_order(page: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors have the line numbers of the page. Pages of cells (docs/course, docs/own) run when the site is built."""
    text = (repository() / "docs" / page).read_text()
    lines = []
    inside = False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
        lines.append(line if inside and line != "```python" else "")
    Path("page.py").write_text("\n".join(lines))
    if "runs/gpt2" in text:  # a run that readers import
        model = tiny(ByteTokenizer(), block_size=64, n_embd=16, n_head=2, n_layer=1)
        jaxgpt.save(model, "runs/gpt2")
    runpy.run_path("page.py")
    assert printed in capsys.readouterr().out


def test_the_reference_is_up_to_date() -> None:
    """`python docs/tools/generate.py` writes the page from the commands, settings and presets."""
    root = repository()
    reference = runpy.run_path(str(root / "docs" / "tools" / "generate.py"))["reference"]
    stale = "docs/reference.md is out of date: run python docs/tools/generate.py"
    assert (root / "docs" / "reference.md").read_text("utf-8") == reference(), stale


def test_the_page_on_families_names_existing_files_and_settings() -> None:
    root = repository()
    text = (root / "docs" / "families.md").read_text()
    assert [path for path in re.findall(r"`((?:jaxgpt|tests|docs)/[\w/.]+)`", text) if not (root / path).exists()] == []
    table = text.split("| difference | setting |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert named - {f.name for f in fields(ModelConfig)} == {"LLLLLG"}


def test_every_family_has_its_measured_differences() -> None:
    """`python tests/parity/families.py` prints the table."""
    text = (repository() / "docs" / "models.md").read_text()
    measured = re.findall(r"^\|[^|]+\| `(\w+)` \|", text, flags=re.M)
    assert measured == ["model_type", *FAMILIES]


def lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_reading_order_names_existing_files_and_their_size() -> None:
    root = repository()
    text = (root / "docs" / "code.md").read_text()
    named = re.findall(r"`((?:jaxgpt|tests)/[\w/.]+)`", text)
    assert [path for path in named if not (root / path).exists()] == []
    packages = {path.name for path in (root / "jaxgpt").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {path.split("/")[1] for path in named if (root / path).is_dir()} == packages
    core = [
        path for package in ("ops", "model", "train", "decoding") for path in (root / "jaxgpt" / package).glob("*.py")
    ]
    walk = {
        path
        for path in re.findall(r"^\d\. .*$", text, flags=re.M)
        for path in re.findall(r"`(jaxgpt/[\w/.]+\.py)`", path)
    }
    about = [int(n.replace(",", "")) for n in re.findall(r"about ([\d,]+)", text)]
    assert [abs(lines(*core) - about[0]) < 100, abs(lines(*(root / p for p in walk)) - about[1]) < 100] == [True, True]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, flags=re.M)
    }


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_links_of_a_page_outside_the_site_lead_to_files_and_headings(name: str) -> None:
    """Links between the pages of the site are checked when it is built."""
    root = repository()
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#([^)]*))?\)", (root / name).read_text("utf-8"))
    assert len(links) > 2
    assert [file for file, _ in links if not (root / file).exists()] == []
    assert [(file, anchor) for file, anchor in links if anchor and anchor not in anchors(root / file)] == []


def test_factors_of_speed_follow_from_their_measurements() -> None:
    """A cell such as 1.11 (34.6, 38.4) has the two measurements: milliseconds of a step, otherwise tokens/s."""
    page = (repository() / "docs" / "performance.md").read_text("utf-8")
    cells = re.findall(r"\*{0,2}([\d.]+(?: to [\d.]+)?)\*{0,2} \(([\d.,]+), ([\d.,]+)\)", page)
    assert len(cells) > 20
    for factors, *measured in cells:
        low, *_, high = [*map(float, factors.split(" to ")), float(factors.split(" to ")[-1])]
        (ours_low, ours_high), (peer_low, peer_high) = map(_rounded_from, measured)
        ratios = [(ours_low / peer_high, ours_high / peer_low), (peer_low / ours_high, peer_high / ours_low)]
        assert any(least - 0.005 <= high and low <= most + 0.005 for least, most in ratios), (factors, measured)


def _rounded_from(number: str) -> tuple[float, float]:
    """Return the interval of values that are rounded to a number with these digits."""
    value = float(number.replace(",", ""))
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return value - half, value + half


def test_the_summary_of_speeds_has_the_ranges_of_the_tables() -> None:
    page = (repository() / "docs" / "performance.md").read_text("utf-8")
    speeds = runpy.run_path(str(repository() / "docs" / "tools" / "speed_chart.py"))["speeds"](page)

    def span(row: str) -> str:
        factors = [factor for each in speeds if each.row == row for factor in each.factors]
        return f"{min(factors):.2f} to {max(factors):.2f}"

    summary = page.partition("![Speed")[0]
    assert span("step: nanoGPT's CPU model: 4 x 128, 12 x 64") in summary
    assert span("decoding: float32, batch 1") in summary
