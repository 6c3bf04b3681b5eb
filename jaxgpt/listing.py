"""List the visible files of a directory tree, without the outputs of jaxgpt."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxgpt.directories import RUN_FILES, holds_run, output_kind
from jaxgpt.errors import plural, reported

LOG = re.compile(r".*\.log|nohup\.out|slurm-.*\.(out|err)", re.IGNORECASE)  # names of logs, which grow during a run


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
    to parents. Subdirectories with outputs of jaxgpt, such as runs, are skipped; if `directory` itself holds a run, only the
    files of the run are skipped. Files that receive the output of this command are skipped. Logs (`LOG`) are also skipped,
    unless most of the files and most of the bytes are logs.
    """
    tree = FileTree(directory)
    files = [*tree.files(directory)]
    skipped = dict(tree.skipped)
    logs = [file for file in files if is_log(file)]
    others = [file for file in files if not is_log(file)]
    are_text = len(logs) > len(others) and _bytes(logs) > _bytes(others)  # such as archives of chats
    if logs and not are_text:
        skipped["log"] = len(logs)
        files = others
    return Listing(tuple(files), skipped)


def is_log(file: Path) -> bool:
    """Return whether a file is a log, by its name."""
    return bool(LOG.fullmatch(file.name))


def _bytes(files: Sequence[Path]) -> int:
    """Return the size of all files in bytes; a file that has been deleted meanwhile counts as 0."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


class FileTree:
    """A directory tree: reads each directory once, and counts the skipped directories and output files.

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
