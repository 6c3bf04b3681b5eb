"""Write the URL of the repository wherever it is shown: `python docs/tools/repository.py https://github.com/ME/jaxgpt`.

The URL of today is `Repository` in `[project.urls]` of pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "CITATION.cff", "README.md", "docs/start.md")


def write(root: Path, new: str) -> None:
    """Replace the URL of the repository in `FILES`, and the directory that `git clone` makes.

    Args:
        root: the clone.
        new: the URL, without `.git` and without a slash at its end.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    old = project["urls"]["Repository"]
    clone = f"git clone {old} && cd {_name(old)}"

    for name in FILES:
        path = root / name
        text = path.read_text("utf-8")
        text = text.replace(clone, f"git clone {new} && cd {_name(new)}")
        path.write_text(text.replace(old, new), "utf-8")


def _name(url: str) -> str:
    return url.rpartition("/")[2]


if __name__ == "__main__":
    url = sys.argv[1].removesuffix("/").removesuffix(".git") if len(sys.argv) == 2 else ""
    if urlsplit(url).scheme != "https" or not _name(url):
        sys.exit("usage: python docs/tools/repository.py URL, such as https://github.com/ME/jaxgpt")
    write(ROOT, url)
