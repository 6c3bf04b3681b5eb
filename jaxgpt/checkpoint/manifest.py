"""The manifest of a checkpoint: checksums that reveal any byte that changes after the checkpoint was written.

`MANIFEST.sha256` has the format of coreutils, so that `sha256sum -c MANIFEST.sha256` checks a copy without this program.
Its first line, a comment there, is the checksum of the lines that follow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from jaxgpt.files import write_atomically

NAME = "MANIFEST.sha256"
HEADER = "# sha256 of the lines below: "


def checksums(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Compute the SHA-256 of files below a folder, by their relative paths, and flush each file to disk.

    Args:
        folder: the folder.
        names: relative paths; None: all files.
    """
    if names is None:
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    sums = {}
    for name in names:
        with (folder / name).open("rb") as f:
            sums[name] = hashlib.file_digest(f, "sha256").hexdigest()
            os.fsync(f.fileno())
    return sums


def write(folder: Path, sums: dict[str, str]) -> None:
    """Write the manifest of a folder atomically."""
    write_atomically(folder / NAME, _render(sums))


def read(folder: Path) -> dict[str, str]:
    """Read the manifest of a folder.

    Raises:
        ValueError: it has changed since it was written.
        FileNotFoundError: there is none.
    """
    text = (folder / NAME).read_bytes().decode("utf-8", "replace")
    rows = [line.split("  ", 1) for line in text.splitlines()[1:]]
    sums = {row[1]: row[0] for row in rows if len(row) == 2}
    if text != _render(sums):
        raise ValueError(f"{NAME} has changed since it was written")
    return sums


def first_change(folder: Path, sums: dict[str, str]) -> str:
    """Say what is wrong with the first file that does not match its checksum; "" if all match."""
    for name, expected in sums.items():
        try:
            with (folder / name).open("rb") as f:
                if hashlib.file_digest(f, "sha256").hexdigest() != expected:
                    return f"{name} has changed since it was written"
        except OSError as e:
            return f"{name} cannot be read ({e.strerror})"
    return ""


def _render(sums: dict[str, str]) -> str:
    body = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    return f"{HEADER}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"
