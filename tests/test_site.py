"""docs/tools/check_site.py detects each fault of a built site; docs/conf.py derives the links of a hosted site."""

from __future__ import annotations

import html
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from helpers import repository

DOCS = repository() / "docs"
CHECK = runpy.run_path(str(DOCS / "tools" / "check_site.py"))
TOOL = runpy.run_path(str(DOCS / "tools" / "repository.py"))
GOOD = """<!doctype html><html><head><link rel="stylesheet" href="style.css"><script src="s.js?v=1"></script></head>
<body><h1 id="top">A</h1><a href="#top">here</a> <a href="sub/">there</a> <a href="https://example.org/x#y">elsewhere</a>
<img src="data:image/png;base64,AA=="><pre>/usr/lib/python3.11, runs/home/x, https://example.org/home/x</pre></body></html>"""


def site(**files: str) -> list[str]:
    written = {
        "index.html": GOOD,
        "sub/index.html": '<a href="../index.html#top">up</a>',
        "style.css": "p {}",
        "s.js": "",
        "search.html": "",
        "searchindex.js": "Search.setIndex({})",
    }
    for name, text in (written | files).items():
        path = Path("site") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found: list[str] = CHECK["check"](Path("site"), Path("/srv/build/checkout"))
    return found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ""),
        ('<a href="gone.html">', "x.html: no such file: gone.html"),
        ('<a href="index.html#gone">', "x.html: no such anchor: index.html#gone"),
        ('<a href="#gone">', "x.html: no such anchor: #gone"),
        ('<a href="htp://example.org/">', "x.html: no valid address: htp://example.org/"),
        ('<script src="https://example.org/a.js">', "x.html: loads from another host: https://example.org/a.js"),
        ('<img src="//example.org/a.png">', "x.html: loads from another host: //example.org/a.png"),
        ('<link rel="preload" href="https://example.org/f">', "x.html: loads from another host: https://example.org/f"),
        ("<pre>/home/someone/file.py</pre>", "x.html: a path of this machine: /home/someone"),
        ("<pre>in /srv/build/checkout/docs</pre>", "x.html: a path of this machine: /srv/build/checkout"),
    ],
)
def test_a_fault_of_a_page_is_noticed(text: str, fault: str) -> None:
    assert site(**{"x.html": text}) == [fault] * bool(fault)


def test_faults_of_other_files_are_noticed() -> None:
    style = "@import url(https://example.org/a.css); p { background: url('//example.org/b.png') }"
    assert site(**{"y.css": style}) == [
        "y.css: loads from another host: https://example.org/a.css",
        "y.css: loads from another host: //example.org/b.png",
    ]
    Path("site/y.css").unlink()
    assert site(**{"z.ipynb": '"/tmp/abc/x"'}) == ["z.ipynb: a path of this machine: /tmp/abc"]
    Path("site/z.ipynb").unlink()
    with Path("site/large.bin").open("wb") as file:
        file.truncate(21_000_000)
    assert site() == ["the site has 21.0 MB, more than 20 MB"]
    Path("site/large.bin").unlink()
    Path("site/searchindex.js").unlink()
    assert CHECK["check"](Path("site"), Path("/srv/build/checkout")) == ["no searchindex.js"]


@pytest.mark.parametrize(
    ("url", "pages", "colab"),
    [
        ("", "", ""),
        ("https://git.example.org/me/gpt", "", ""),
        ("https://github.com/me", "", ""),
        ("https://github.com/Me/gpt", "https://me.github.io/gpt/", "Me/gpt/blob/gh-pages/course/a.ipynb"),
        ("https://github.com/me/gpt.git", "https://me.github.io/gpt/", "me/gpt/blob/gh-pages/course/a.ipynb"),
        ("https://github.com/me/Me.github.io", "https://me.github.io/", "me/Me.github.io/blob/gh-pages/course/a.ipynb"),
    ],
)
def test_the_urls_of_the_site_follow_from_the_repository(url: str, pages: str, colab: str) -> None:
    assert TOOL["pages"](url) == pages
    assert TOOL["colab"](url, "course/a.ipynb").removeprefix("https://colab.research.google.com/github/") == colab


@pytest.mark.parametrize(("owner", "published"), [("OWNER", ""), ("me", "https://github.com/me/gpt")])
def test_a_placeholder_is_no_published_repository(tmp_path: Path, owner: str, published: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "https://github.com/{owner}/gpt"\n')
    assert TOOL["published"](tmp_path) == published


def build(out: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> dict[str, str]:
    """Build a site of four pages with docs/conf.py, without running cells, and return its files."""
    pytest.importorskip("myst_nb")
    pytest.importorskip("furo")
    from sphinx.application import Sphinx

    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    import notebooks

    monkeypatch.setattr(notebooks, "build_wheel", lambda target: "jaxgpt-1-py3-none-any.whl")
    source = out / "source"
    (source / "course").mkdir(parents=True)
    cell = "```{code-cell} python\n1 + 1\n```\n"
    texts = {
        "index": "# Home\n\n[Start](start.md), [a](course/a.md), [b](course/b.md)\n",
        "start": (DOCS / "start.md").read_text("utf-8").partition("| for |")[0],
        "course/a": f"---\nfile_format: mystnb\nkernelspec: {{name: python3}}\n---\n# A\n\n[home](../index.md)\n\n{cell}",
        "course/b": "# B\n\nNo cells.\n",
    }
    for name, text in texts.items():
        (source / f"{name}.md").write_text(text)
    app = Sphinx(
        source,
        DOCS,
        out / "site",
        out / "doctrees",
        "html",
        confoverrides={"nb_execution_mode": "off", "suppress_warnings": ["toc.not_included"], **settings},
        status=None,
        warning=io.StringIO(),
    )
    app.build()
    assert app.statuscode == 0
    files = (out / "site").rglob("*")
    return {
        path.relative_to(out / "site").as_posix(): path.read_text("utf-8")
        for path in files
        if path.suffix in (".html", ".ipynb") or path.name == ".nojekyll"
    }


def visible(page: str) -> str:
    """Return the text of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def installed(notebook: str) -> str:
    """Return the wheel that the first cell of a notebook installs."""
    first: dict[str, Any] = json.loads(notebook)["cells"][0]
    return str(first["source"][-1]).split()[-1]


@pytest.mark.ci
def test_a_site_without_a_repository_has_no_address_and_no_link_to_colab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = build(tmp_path, monkeypatch, repository_url="")
    assert [name for name, text in files.items() if "colab.research" in text or 'rel="canonical"' in text] == []
    assert '<a href="a.ipynb" download>Download as a notebook</a></p>' in files["course/a.html"]
    assert installed(files["course/a.ipynb"]) == "jaxgpt-1-py3-none-any.whl"
    assert CHECK["check"](tmp_path / "site", tmp_path / "source") == []


@pytest.mark.ci
def test_the_address_of_the_site_and_its_links_to_colab_follow_from_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = build(tmp_path, monkeypatch, repository_url="https://github.com/me/gpt")
    assert "git clone https://github.com/me/gpt && cd gpt" in visible(files["start.html"])
    assert [name for name, text in files.items() if TOOL["PLACEHOLDER"] in text] == []
    for page in ("index", "start", "course/a", "course/b"):
        assert f'<link rel="canonical" href="https://me.github.io/gpt/{page}.html">' in files[f"{page}.html"]
    colab = "https://colab.research.google.com/github/me/gpt/blob/gh-pages/course/a.ipynb"
    assert [name for name, text in files.items() if colab in text] == ["course/a.html"]
    assert installed(files["course/a.ipynb"]) == "https://me.github.io/gpt/course/jaxgpt-1-py3-none-any.whl"
    assert ".nojekyll" in files  # otherwise GitHub omits the directory _static
    assert CHECK["check"](tmp_path / "site", tmp_path / "source") == []
