"""Files of data: list the visible files of a directory tree, and recognize files of records."""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxgpt.directories import RUN_FILES, holds_run, output_kind
from jaxgpt.errors import UserError, plural, reported

PACKED = (".gz", ".xz", ".bz2", ".zst")  # suffixes of compressed files
RECORDS = (".jsonl", ".ndjson", ".parquet")  # suffixes of files with a record per line or row
DOCUMENTATION = (".md", ".json", "")  # suffixes of other files in a directory of records, such as README.md and LICENSE
# Descriptions of a data set, as the library datasets writes them.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
LOG = re.compile(r".*\.log|nohup\.out|slurm-.*\.(out|err)", re.IGNORECASE)  # names of logs, which grow during a run
HEAD = 1 << 16  # bytes of a JSON file that show its layout
# Beginning of an array of objects, or an object in one line, which ends with a brace or has no line break in `HEAD` bytes.
_RECORDS = re.compile(rb"\s*(\[\s*\{|\{[^\n]*(\}\s*\n|\Z))")


@dataclass(frozen=True)
class Listing:
    """The files of a directory tree.

    Attributes:
        files: visible files, sorted by path.
        skipped: number of skipped directories, logs and output files, keyed by kind: {"run": 2}.
    """

    files: tuple[Path, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """The skipped directories and files, such as `2 runs and 1 exported model`, or ""."""
        return " and ".join(plural(number, kind) for kind, number in self.skipped.items())


def list_files(directory: Path) -> Listing:
    """List the visible files of a directory tree, sorted by path.

    Every directory is read at most once. Links to directories are followed, except to directories that are read anyway and
    to parents. If `directory` itself holds a run, only the files of the run are skipped. Files that receive the output of this
    command are skipped. Logs (`LOG`) are also skipped, unless most of the files and most of the bytes are logs.
    """
    tree = _Tree(directory)
    files = [*tree.files(directory)]
    skipped = dict(tree.skipped)
    logs = [file for file in files if LOG.fullmatch(file.name)]
    others = [file for file in files if not LOG.fullmatch(file.name)]
    are_text = len(logs) > len(others) and _bytes(logs) > _bytes(others)  # such as archives of chats
    if logs and not are_text:
        skipped["log"] = len(logs)
        files = others
    return Listing(tuple(files), skipped)


def _bytes(files: Sequence[Path]) -> int:
    """Return the size of all files in bytes; a file that has been deleted meanwhile counts as 0."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


class _Tree:
    """A directory tree: reads each directory once, and counts what is skipped.

    Attributes:
        skipped: number of skipped directories and output files so far, keyed by kind.
    """

    def __init__(self, directory: Path) -> None:
        self.skipped: Counter[str] = Counter()
        self._root = directory.resolve()
        self._seen: set[tuple[int, int]] = set()  # device and inode of each directory that was read

    def files(self, directory: Path) -> Iterator[Path]:
        """Yield the visible files below a directory of the tree, sorted by path."""
        with reported(f"cannot read {directory}"):
            status = directory.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in self._seen:
                return
            self._seen.add(identity)
            paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))

        of_run = RUN_FILES if holds_run(directory) else ()
        for path in paths:
            if path.name in of_run:
                continue
            if path.is_dir():
                yield from self._below(path)
            elif _receives_output(path):
                self.skipped["output file"] += 1
            elif path.is_file():
                yield path

    def _below(self, directory: Path) -> Iterator[Path]:
        """Yield the files of a subdirectory; skip outputs of jaxgpt, and links to directories that are read anyway."""
        if directory.is_symlink() and _is_read_anyway(directory.resolve(), self._root):
            return
        kind = output_kind(directory)
        if kind:
            self.skipped[kind] += 1
        else:
            yield from self.files(directory)


def _receives_output(path: Path) -> bool:
    """Return whether the output of this process is redirected to a file, as by `> train.txt`."""
    for descriptor in (1, 2):
        with suppress(OSError):  # a closed descriptor, or a file that has been removed
            output = os.fstat(descriptor)
            if stat.S_ISREG(output.st_mode) and os.path.samestat(output, path.stat()):
                return True
    return False


def _is_read_anyway(target: Path, root: Path) -> bool:
    """Return whether a link would lead to a parent of the tree, or to a directory inside the tree that is not skipped."""
    if root.is_relative_to(target):
        return True
    if not target.is_relative_to(root):
        return False
    if any(part.startswith(".") for part in target.relative_to(root).parts):
        return False
    outer = [parent for parent in target.parents if parent != root and parent.is_relative_to(root)]
    return not any(output_kind(parent) for parent in outer)


def holds_records(path: Path) -> bool:
    """Return whether a path is a file of records, or a directory of such files, documentation and logs.

    The name determines this: JSON Lines, Parquet and compressed JSON are records. An uncompressed `.json` file is records if
    it begins with an array of objects or with a complete object in a line, and otherwise text. Directories are listed as by
    `list_files`: links are followed, and runs, exported models and prepared ids are skipped.
    """
    if not path.is_dir():
        return _is_records(path)
    found = False
    try:
        for file in _Tree(path).files(path):
            if _is_records(file):
                found = True
            elif file.suffix.lower() not in DOCUMENTATION and not LOG.fullmatch(file.name):
                return False
    except UserError:  # the reader of the directory reports the error
        return False
    return found


def _is_records(path: Path) -> bool:
    """Return whether a file holds records, by its name, and if it is JSON by its beginning."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    name = name.removesuffix(packed)
    if name.endswith(RECORDS):
        return True
    if not name.endswith(".json") or name in DESCRIPTIONS:
        return False
    return bool(packed) or _begins_as_records(path)


def _begins_as_records(path: Path) -> bool:
    """Return whether a JSON file begins with an array of objects, or with a complete object in a line."""
    if not path.is_file():  # for example, a named pipe, which would block
        return False
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:  # the reader of the file reports the error
        return False
    return bool(_RECORDS.match(head.removeprefix(codecs.BOM_UTF8)))
