"""Notes on the files of sources: documents that are probably repeated, and markup that becomes text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxgpt.data.files.formats import STRUCTURED
from jaxgpt.data.prepared.sources import HUB, Source
from jaxgpt.data.token_files import split_of
from jaxgpt.record_files import PACKED

VERSION = re.compile(r"(?:(?<![A-Za-z])[vV]|(?<=[a-z])V)(\d+)(?![A-Za-z])")  # the 2 in `v2-train` and `StoriesV2-train`


def repeated_text(sources: Sequence[Source], beginning: Callable[[Path], str]) -> str:
    """Describe files that probably hold the same documents, or return "".

    The comparison covers the content of all files, the beginnings of the first files of each format, and versions in names.

    Args:
        sources: sources of documents.
        beginning: function that returns the beginning of the first document of a file; "": too short to compare.
    """
    files = [path for source in sources for path in source.files]
    found = [*_copies(sources), *_formats(files, beginning), *_versions(files)]
    if not found:
        return ""
    advice = "pass only the files to read"
    name = sources[0].name
    if name.startswith(HUB):
        advice = f"choose files with {name}/PATTERN"
    return f"some text may be read twice: {'; '.join(found)}: {advice}, or use --dedup exact"


def structured_text(sources: Sequence[Source]) -> str:
    """Describe the files with structure that becomes part of the text, such as CSV, or return ""."""
    found = [path for source in sources for path in source.files if _suffix(path) in STRUCTURED]
    if not found:
        return ""
    kinds = ", ".join(sorted({STRUCTURED[_suffix(path)] for path in found}))
    also = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
    return f"{found[0]}{also}: {kinds} read as plain text; write its texts to JSON Lines or Parquet to read only them"


def _copies(sources: Sequence[Source]) -> list[str]:
    """Describe files that are links to the same file, or have equal sizes and equal samples of their content."""
    first = dict[tuple[int, str], Path]()
    copies = []
    for source in sources:
        for path, digest in zip(source.files, source.digests, strict=True):
            key = (path.stat().st_size, digest)
            if key in first:
                copies.append(f"{path} is equal to {first[key]}")
            first.setdefault(key, path)
    if len(copies) > 1:
        return [f"{copies[0]} (and {len(copies) - 1:,} more)"]
    return copies


def _formats(files: Sequence[Path], beginning: Callable[[Path], str]) -> list[str]:
    """Describe files of different formats that begin with the same text: the first file of each format and split."""
    first = dict[tuple[str, str], Path]()
    for path in files:
        first.setdefault((_suffix(path), split_of(path)), path)
    if len({suffix for suffix, _ in first}) < 2:
        return []
    seen = dict[str, Path]()
    found = []
    for path in first.values():
        text = beginning(path)
        if text in seen and _suffix(seen[text]) != _suffix(path):
            found.append(f"{seen[text]} and {path} begin with the same text")
        if text:
            seen.setdefault(text, path)
    return found


def _versions(files: Iterable[Path]) -> list[str]:
    """Describe names that differ by a version: `v1-a.txt` and `v2-a.txt`, or `stories.txt` and `stories-v2.txt`.

    The name with a version may have more words than the other name, but not fewer: `StoriesV2-GPT4-train.txt` and
    `Stories-train.txt` differ by a version.
    """
    plain = []
    versions = []
    for path in files:
        version = VERSION.search(path.name)
        if version:
            versions.append((path, version))
        else:
            plain.append(path)

    first = dict[str, Path]()  # first file with a version, keyed by its name without the version
    for path, version in versions:
        before = path.name[: version.start()]
        without_version = before + path.name[version.end() :]
        same = [first[without_version]] if without_version in first else []
        same += [other for other in plain if _is_plain_version(other, path, before.rstrip("-_. "), without_version)]
        if same:
            return [f"{same[0]} and {path} are versions of one text"]
        first[without_version] = path
    return []


def _is_plain_version(plain: Path, path: Path, before: str, without_version: str) -> bool:
    """Return whether two names differ only by a version and further words in the name with the version.

    Args:
        plain: file without a version in its name.
        path: file with a version in its name.
        before: the part of the name of `path` before the version, without trailing separators; empty: the name begins with
            the version, so no file matches.
        without_version: the name of `path` without the version.
    """
    if not before or not plain.name.startswith(before):
        return False
    is_alike = (_suffix(plain), split_of(plain)) == (_suffix(path), split_of(path))
    return is_alike and _words(plain.name) <= _words(without_version)


def _words(name: str) -> set[str]:
    """Return the words of a file name without the suffix of a compression."""
    return set(re.split(r"[-_. ]+", name)) - {packed.lstrip(".") for packed in PACKED}


def _suffix(path: Path) -> str:
    """Return the format of a file by its name: the last suffix, except the suffix of a compression."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return Path(name).suffix
