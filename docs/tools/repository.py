"""Write the URL of the repository wherever it is shown: `python docs/tools/repository.py https://github.com/ME/jaxgpt`.

The current URL is `Repository` in `[project.urls]` of pyproject.toml. docs/conf.py derives the URL of the site and the Colab
links from it, unless it is the placeholder.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "CITATION.cff", "README.md", "docs/start.md")
PLACEHOLDER = "OWNER"  # the owner in the URL of a repository that is not published


def current(root: Path = ROOT) -> str:
    """Return the URL of the repository in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    url: str = project["urls"]["Repository"]
    return url


def published(root: Path = ROOT) -> str:
    """Return the URL of the repository; "": it is the placeholder."""
    url = current(root)
    if f"/{PLACEHOLDER}/" in url:
        return ""
    return url


def pages(url: str) -> str:
    """Return the URL of a repository's GitHub Pages; "": the repository is not on GitHub."""
    owner, name = _on_github(url)
    if not owner:
        return ""
    host = f"{owner.lower()}.github.io"
    if name.lower() == host:  # the pages of the owner
        return f"https://{host}/"
    return f"https://{host}/{name}/"


def colab(url: str, notebook: str) -> str:
    """Return the URL that opens a notebook of the site in Colab; "": the repository is not on GitHub.

    Colab reads notebooks from GitHub: the branch `gh-pages` holds the built site.

    Args:
        url: URL of the repository.
        notebook: path of the notebook in the site, such as `course/text.ipynb`.
    """
    owner, name = _on_github(url)
    if not owner:
        return ""
    return f"https://colab.research.google.com/github/{owner}/{name}/blob/gh-pages/{notebook}"


def with_url(text: str, old: str, new: str) -> str:
    """Replace the URL of the repository in a text, and the directory that `git clone` creates."""
    clone = f"git clone {old} && cd {_name(old)}"
    text = text.replace(clone, f"git clone {new} && cd {_name(new)}")
    return text.replace(old, new)


def write(root: Path, new: str) -> None:
    """Replace the URL of the repository in `FILES`.

    Args:
        root: the clone.
        new: the URL, without `.git` and without a slash at its end.
    """
    old = current(root)
    for name in FILES:
        path = root / name
        path.write_text(with_url(path.read_text("utf-8"), old, new), "utf-8")


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def _on_github(url: str) -> tuple[str, str]:
    """Return the owner and the name of a repository on GitHub; ("", ""): it is not there."""
    parts = urlsplit(url)
    owner, _, name = parts.path.strip("/").partition("/")
    if parts.netloc.lower() != "github.com" or not name:
        return "", ""
    return owner, name.removesuffix(".git")


if __name__ == "__main__":
    url = sys.argv[1].removesuffix("/").removesuffix(".git") if len(sys.argv) == 2 else ""
    if urlsplit(url).scheme != "https" or not _name(url):
        sys.exit("usage: python docs/tools/repository.py URL, such as https://github.com/ME/jaxgpt")
    write(ROOT, url)
