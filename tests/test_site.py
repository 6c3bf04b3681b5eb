"""docs/tools/check_site.py detects each fault of a built site."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from helpers import repository

CHECK = runpy.run_path(str(repository() / "docs" / "tools" / "check_site.py"))
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
