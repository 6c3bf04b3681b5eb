"""Sources of documents: files, directories and Hugging Face datasets, and what identifies their content."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.formats import LINES, PACKED, STRUCTURED, check_no_arrow
from jaxgpt.data.token_files import split_of
from jaxgpt.directories import list_files, output_kind
from jaxgpt.errors import UserError, printable, reported
from jaxgpt.files import check_kind, missing
from jaxgpt.hub import download

HUB = "hf:"  # prefix of the name of a Hugging Face dataset
KINDS = [f"{kind}{packed}" for kind in (".txt", *LINES) for packed in ("", *PACKED)]
PACKED_JSON = [f".json{packed}" for packed in PACKED]
FILES = [f"*{suffix}" for suffix in (*KINDS, *PACKED_JSON, ".parquet")]  # default patterns of a dataset
SAMPLE = 1 << 16  # bytes of each sample of a file's content
SAMPLES = 16  # evenly spaced samples of a file's content
VERSION = re.compile(r"(?:(?<![A-Za-z])[vV]|(?<=[a-z])V)(\d+)(?![A-Za-z])")  # the 2 of `v2-train` and `StoriesV2-train`


class Source(NamedTuple):
    """A file, a directory or a Hugging Face dataset."""

    name: str  # path or `hf:OWNER/NAME[/PATTERN]`, as given
    root: Path  # directory to which the names of the files are relative; for a single file, the file itself
    files: tuple[Path, ...]  # sorted, without empty files
    size: int  # total bytes on disk
    fingerprint: str  # SHA-256 of names, sizes and modification times of the files
    digests: tuple[str, ...]  # `sampled_digest` of each file
    skipped: str = ""  # directories that hold no text, such as `2 runs`

    def entry(self) -> dict[str, Any]:
        """Return the description of the source in index.json; `content` identifies it without modification times."""
        sizes = [path.stat().st_size for path in self.files]
        names = [str(path.relative_to(self.root)) for path in self.files]
        content = json.dumps([names, sizes, self.digests])
        return {
            "name": printable(self.name),
            "files": len(self.files),
            "size": self.size,
            "fingerprint": self.fingerprint,
            "content": hashlib.sha256(content.encode()).hexdigest(),
        }


def find_source(name: str) -> Source:
    """List non-empty files of a path or `hf:OWNER/NAME[/PATTERN]`; raise `UserError` if no file is found.

    The files of a Hugging Face dataset that match the pattern (default: `FILES`) are downloaded to the Hub's cache.
    """
    path, files, skipped = _files_of(name)
    for file in files:
        check_no_arrow(file)
    files = [file for file in files if file.stat().st_size]
    if not files:
        also = f" (skipped {skipped})" if skipped else ""
        raise UserError(f"{name} has no files, or only empty files{also}: choose a different source")
    stats = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fingerprint = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    return Source(
        name=name,
        root=path,
        files=tuple(files),
        size=sum(size for _, size, _ in stats),
        fingerprint=fingerprint,
        digests=tuple(map(sampled_digest, files)),
        skipped=skipped,
    )


def _files_of(name: str) -> tuple[Path, list[Path], str]:
    """Return the root and the files of a source, and a note on skipped files or ""."""
    if name.startswith(HUB):
        root, files = _dataset(name)
        return root, files, ""
    path = Path(name)
    if not path.exists():
        raise missing(name, f"; a Hugging Face dataset is {HUB}OWNER/NAME")
    if not path.is_dir():
        check_kind(path)
        return path, [path], ""
    kind = output_kind(path)
    if kind not in ("", "run"):
        raise UserError(f"{name} holds no text ({kind}): choose a different source")
    listing = list_files(path)
    return path, [*listing.files], listing.note


def sampled_digest(path: Path) -> str:
    """Return the SHA-256 of evenly spaced samples of a file, or of the complete file if it is small."""
    digest = hashlib.sha256()
    with reported(f"cannot read {path}"), path.open("rb") as file:
        size = path.stat().st_size
        if size <= SAMPLE * SAMPLES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        for number in range(SAMPLES):
            file.seek((size - SAMPLE) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def repeated_text(sources: Sequence[Source], beginning: Callable[[Path], str]) -> str:
    """Describe files that probably hold the same documents, or return "".

    Compared are files of equal content, the first files of each format by their beginning, and the versions in the names.

    Args:
        beginning: function that returns the beginning of the first document of a file; "": too short to compare.
    """
    files = [path for source in sources for path in source.files]
    found = [*_copies(sources), *_formats(files, beginning), *_versions(files)]
    if not found:
        return ""
    first = sources[0].name
    advice = "pass only the files to read"
    if first.startswith(HUB):
        advice = f"choose files with {first}/PATTERN"
    return f"some text may be read twice: {'; '.join(found)}: {advice}, or use --dedup exact"


def structured_text(sources: Sequence[Source]) -> str:
    """Describe the files with structure that becomes part of the text, such as CSV, or return ""."""
    found = [path for source in sources for path in source.files if _suffix(path) in STRUCTURED]
    if not found:
        return ""
    kinds = ", ".join(sorted({STRUCTURED[_suffix(path)] for path in found}))
    also = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
    return f"{found[0]}{also}: {kinds} read as plain text; write its texts to JSON Lines or Parquet to read only them"


def _dataset(name: str) -> tuple[Path, list[Path]]:
    """Download a dataset; return its directory and the files that match its pattern."""
    owner, repo, pattern = [*name.removeprefix(HUB).split("/", 2), "", ""][:3]
    patterns = [pattern] if pattern else FILES
    path = download(f"{owner}/{repo}", patterns, kind="dataset")
    files = []
    for file in list_files(path).files:  # the cache may also contain files of other patterns
        relative = str(file.relative_to(path))
        if any(fnmatch(relative, each) for each in patterns):
            files.append(file)
    return path, files


def _copies(sources: Sequence[Source]) -> list[str]:
    """Describe files that are links to the same file, or have equal content."""
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


def _suffix(path: Path) -> str:
    """Return the format of a file by its name: the suffix without the compression's."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return Path(name).suffix


def _words(name: str) -> set[str]:
    """Return the words of a file name without the suffix of a compression."""
    return set(re.split(r"[-_. ]+", name)) - {packed.lstrip(".") for packed in PACKED}


def _versions(files: Iterable[Path]) -> list[str]:
    """Describe names that differ by a version: `v1-a.txt` and `v2-a.txt`, or `stories.txt` and `stories-v2.txt`.

    A name with a version may have more words, as `StoriesV2-GPT4-train.txt` and `Stories-train.txt` have, but not fewer.
    """
    plain = []
    marked = []
    for path in files:
        found = VERSION.search(path.name)
        if found:
            marked.append((path, found))
        else:
            plain.append(path)

    first = dict[str, Path]()
    for path, found in marked:
        others = path.name[: found.start()] + path.name[found.end() :]
        before = path.name[: found.start()].rstrip("-_. ")
        same = [first[others]] if others in first else []
        for other in plain if before else ():
            is_alike = (_suffix(other), split_of(other)) == (_suffix(path), split_of(path))
            if is_alike and other.name.startswith(before) and _words(other.name) <= _words(others):
                same.append(other)
        if same:
            return [f"{same[0]} and {path} are versions of one text"]
        first[others] = path
    return []
