"""Check the built site: `python docs/tools/check_site.py build/site`. The exit code is 1 if a check fails.

- The site has at most 20 MB.
- Every link inside the site leads to a file, and every #fragment to an id of that file.
- The site contains index.html, the search page and its index, so that the search works without a network.
- Nothing is loaded from other hosts: no script, style sheet, font, image or frame.
- No text file of the site contains a path of this machine, such as the source directory of the build.
- Links to other hosts have a host name and the scheme https or http. They are not opened, so the check needs no network.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

MEGABYTES = 20
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOCAL = re.compile(r"(?<![\w.:/-])/(?:home|root|tmp|work|Users|var/folders|mnt/data)/[\w.-]+")
# Match references from a style sheet to other hosts.
FOREIGN = re.compile(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)")


class Page(HTMLParser):
    """Links, ids and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given and (name == "id" or tag == "a")}
        if tag in ("a", "area") and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given:
            self.loads.append(given[LOADS[tag]])
        if tag == "link" and given.get("rel") not in ("canonical", "author", "prev", "next"):
            self.loads.append(given.get("href", ""))


def check(site: Path, root: Path) -> list[str]:
    """Return one line per problem of the site.

    Args:
        site: directory of the built site.
        root: directory of the repository; its path must not occur in the site.
    """
    site = site.resolve()
    files = [path for path in site.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    wrong = [f"the site has {size:.1f} MB, more than {MEGABYTES} MB"] if size > MEGABYTES else []
    pages = {path: Page(path) for path in files if path.suffix == ".html"}
    wrong += [f"no {name}" for name in ("index.html", "search.html", "searchindex.js") if not (site / name).is_file()]
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.links + page.loads:
            wrong += [f"{name}: {why}: {link}" for why in [_fault(link, path, pages, link in page.loads)] if why]
    folders = [str(folder) for folder in (root, Path.home()) if len(folder.parts) > 2]
    for path in files:
        if path.suffix not in (".html", ".css", ".js", ".ipynb", ".txt", ".svg"):
            continue
        name, text = path.relative_to(site), path.read_text("utf-8")
        if path.suffix == ".css":
            wrong += [f"{name}: loads from another host: {url}" for url in FOREIGN.findall(text)]
        local = set(LOCAL.findall(text)) | {folder for folder in folders if folder in text}
        wrong += [f"{name}: a path of this machine: {each}" for each in sorted(local)]
    return wrong


def _fault(link: str, path: Path, pages: dict[Path, Page], loaded: bool) -> str:
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        if loaded:
            return "loads from another host"
        return "" if parts.scheme in ("http", "https") and "." in parts.netloc else "no valid address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "no such anchor"
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python docs/tools/check_site.py SITE, the directory of the built site")
    faults = check(Path(sys.argv[1]), Path(__file__).resolve().parents[2])
    print(
        "\n".join(faults) or f"{sys.argv[1]} passed the checks: links, anchors, size, search, other hosts, local paths"
    )
    sys.exit(bool(faults))
