"""Sources of documents: files, directories and Hugging Face datasets, and what identifies their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from jaxgpt.data.files.formats import LINES, check_no_arrow
from jaxgpt.data.prepared.index import SourceEntry
from jaxgpt.directories import output_kind
from jaxgpt.errors import UserError, printable, reported
from jaxgpt.files import check_kind, missing
from jaxgpt.hub import download
from jaxgpt.listing import list_files
from jaxgpt.record_files import PACKED

HUB = "hf:"  # prefix of the name of a Hugging Face dataset
KINDS = [f"{kind}{packed}" for kind in (".txt", *LINES) for packed in ("", *PACKED)]
PACKED_JSON = [f".json{packed}" for packed in PACKED]
FILES = [f"*{suffix}" for suffix in (*KINDS, *PACKED_JSON, ".parquet")]  # default patterns of a dataset
SAMPLE = 1 << 16  # bytes of each sample of a file's content
SAMPLES = 16  # evenly spaced samples of a file's content
DIGESTS = 100  # maximum number of files whose digests a checkpoint records, to name changed files


class Source(NamedTuple):
    """A file, a directory or a Hugging Face dataset."""

    name: str  # path or `hf:OWNER/NAME[/PATTERN]`, as given
    root: Path  # directory to which the names of the files are relative; for a single file, the file itself
    files: tuple[Path, ...]  # sorted, without empty files
    size: int  # total bytes on disk
    fingerprint: str  # SHA-256 of names, sizes and modification times of the files
    digests: tuple[str, ...]  # `sampled_digest` of each file
    skipped: str = ""  # skipped directories, output files and logs, such as `2 runs and 1 log`

    def entry(self) -> SourceEntry:
        """Return the description of the source in index.json."""
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
    """List non-empty files of a path or `hf:OWNER/NAME[/PATTERN]`; raise `UserError` if no file is found, or for an Arrow file.

    The files of a Hugging Face dataset that match the pattern (default: `FILES`) are downloaded to the Hub's cache.
    """
    found = _find_files(name)
    for file in found.files:
        check_no_arrow(file)
    files = tuple(file for file in found.files if file.stat().st_size)
    if not files:
        also = f" (skipped {found.skipped})" if found.skipped else ""
        raise UserError(f"{name} has no files, or only empty files{also}: choose a different source")

    stats = [(str(file.relative_to(found.root)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fingerprint = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    return Source(
        name=name,
        root=found.root,
        files=files,
        size=sum(size for _, size, _ in stats),
        fingerprint=fingerprint,
        digests=tuple(map(sampled_digest, files)),
        skipped=found.skipped,
    )


class _SourceFiles(NamedTuple):
    """The files of a source, including empty files; fields as in `Source`."""

    root: Path
    files: Sequence[Path]
    skipped: str = ""


def _find_files(name: str) -> _SourceFiles:
    """Find the files of a source; download a Hugging Face dataset."""
    if name.startswith(HUB):
        return _dataset(name)
    path = Path(name)
    if not path.exists():
        raise missing(name, f"; a Hugging Face dataset is {HUB}OWNER/NAME")
    if not path.is_dir():
        check_kind(path)
        return _SourceFiles(path, [path])
    kind = output_kind(path)
    if kind not in ("", "run"):
        raise UserError(f"{name} holds no text ({kind}): choose a different source")
    listing = list_files(path)
    return _SourceFiles(path, listing.files, listing.note)


def _dataset(name: str) -> _SourceFiles:
    """Download a dataset, and find the files that match its pattern."""
    owner, repo, pattern = [*name.removeprefix(HUB).split("/", 2), "", ""][:3]
    patterns = [pattern] if pattern else FILES
    path = download(f"{owner}/{repo}", patterns, kind="dataset")
    files = []
    for file in list_files(path).files:  # the cache may also contain files of other patterns
        relative = str(file.relative_to(path))
        if any(fnmatch(relative, each) for each in patterns):
            files.append(file)
    return _SourceFiles(path, files)


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


def file_digests(directory: Path, files: Sequence[Path]) -> dict[str, str]:
    """Return a digest of each file of a directory, keyed by relative path; {} for a single file or more than `DIGESTS`.

    Checkpoints record the paths, so bytes that are not UTF-8 are escaped.
    """
    if not directory.is_dir() or len(files) > DIGESTS:
        return {}
    digests = {}
    for file in files:
        digests[printable(str(file.relative_to(directory)))] = sampled_digest(file)[:16]
    return digests
