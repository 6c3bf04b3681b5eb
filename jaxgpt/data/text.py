"""The text of a run: a built-in text, a file, or the text files of a directory, with a description."""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote

from jaxgpt.config import DataConfig
from jaxgpt.data.builtin import PYTHON_MODULES, REPEATS_LINES, STATQUEST, fetch_shakespeare, repeats
from jaxgpt.data.files.formats import STRUCTURED
from jaxgpt.data.files.plain_text import read_text_file, read_text_files
from jaxgpt.data.tokenizers.base import END_OF_TEXT
from jaxgpt.directories import output_kind
from jaxgpt.errors import UserError, plural
from jaxgpt.listing import list_files
from jaxgpt.record_files import holds_records

NO_TEXT = "no text is specified: add --data.path FILE"
AS_TEXT = STRUCTURED | {".json": "JSON"}  # formats to name in the description of a text


@dataclass(frozen=True)
class Text:
    """A text in UTF-8."""

    data: bytes
    source: str = ""  # one-line description
    files: tuple[tuple[str, int], ...] = ()  # name and size in bytes of each concatenated file; () for other texts

    @staticmethod
    def of(parts: Mapping[str, bytes], source: str) -> Text:
        """Concatenate files, keyed by name; append a newline to each file that does not end with a newline."""
        lines = {name: part if part.endswith(b"\n") else part + b"\n" for name, part in parts.items()}
        files = tuple((name, len(part)) for name, part in lines.items())
        return Text(b"".join(lines.values()), source, files)

    @property
    def text(self) -> str:
        """The text as a string."""
        return self.data.decode("utf-8")

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


def read_text(config: DataConfig) -> Text:
    """Read the text of `data.path` or `data.dataset`.

    Raises:
        UserError: if the text is missing, empty, too large or not plain UTF-8 text, or cannot be downloaded.
    """
    if config.path:
        return read_path(Path(config.path))
    match config.dataset:
        case "python":
            return python_sources()
        case "shakespeare":
            path = fetch_shakespeare()
            return Text(read_text_file(path), f"tinyshakespeare ({path})")
        case "statquest":
            return Text(STATQUEST.encode(), "StatQuest's two sentences")
        case "repeats":
            return Text(repeats().encode(), f"{REPEATS_LINES:,} lines of a random string, written twice")
    raise UserError(NO_TEXT)


def python_sources() -> Text:
    """Concatenate the sources of a fixed list of standard-library modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = {name: root / f"{name}.py" for name in PYTHON_MODULES}
    source = f"{len(paths)} modules of Python's standard library, {min(paths)} to {max(paths)}, at {root}"
    return Text.of({name: read_text_file(path) for name, path in paths.items()}, source)


def read_path(path: Path) -> Text:
    """Read a text file, or all visible text files of a directory, sorted by path; skip other files.

    Raises:
        UserError: if a file cannot be read, a single file is not text, or the text is empty or too large.
    """
    return _read_directory(path) if path.is_dir() else _read_single_file(path)


def _read_single_file(path: Path) -> Text:
    """Read a file of text."""
    data = read_text_file(path)
    if not data:
        raise UserError(f"{path} is empty: choose a file with text")
    kind = AS_TEXT.get(path.suffix.lower(), "")
    note = f"; {kind} read as plain text" if kind else ""
    return Text(data, f"{path}{note}{_note_on_markers(data, path)}")


def _read_directory(path: Path) -> Text:
    """Read the text files of a directory, sorted by path."""
    kind = output_kind(path)
    if kind not in ("", "run"):
        raise UserError(f"{path} holds no text ({kind}): choose a different --data.path")
    listing = list_files(path)
    parts = read_text_files(path, listing.files)

    # Describe the files that are not part of the text.
    skipped_files = [file for file in listing.files if str(file.relative_to(path)) not in parts]
    size = sum(len(part) for part in parts.values())
    skipped = _describe_skipped(skipped_files, size)
    if listing.note:
        skipped.append(listing.note)
    note = f"; skipped {' and '.join(skipped)}" if skipped else ""

    if not parts:
        fix = "choose a different --data.path"
        if any(file.suffix == ".bin" for file in listing.files):
            fix += ", or rename files of token ids to train.bin and val.bin"
        raise UserError(f"no text files in {path}{note}: {fix}")
    source = f"{plural(len(parts), 'text file')} in {path}{_note_on_formats(parts)}{note}"
    text = Text.of(parts, source)
    return replace(text, source=source + _note_on_markers(text.data, path))


def _describe_skipped(files: Sequence[Path], text_bytes: int) -> list[str]:
    """Describe skipped files; include the path of records larger than the text, which may be only their documentation."""
    records = [file for file in files if holds_records(file)]
    parts = []
    if len(files) > len(records):
        parts.append(plural(len(files) - len(records), "other file"))
    if records:
        part = f"{plural(len(records), 'file')} of records"
        if text_bytes and sum(file.stat().st_size for file in records) >= text_bytes:
            part += f", larger than the text (to train on records instead: --data.path {quote(str(records[0]))})"
        parts.append(part)
    return parts


def _note_on_formats(names: Iterable[str]) -> str:
    """Return a note on files of other formats that are read as text, such as "; 30 JSON files read as plain text", or ""."""
    suffixes = [Path(name).suffix.lower() for name in names]
    kinds = Counter(AS_TEXT[suffix] for suffix in suffixes if suffix in AS_TEXT)
    if not kinds:
        return ""
    files = " and ".join(plural(number, f"{kind} file") for kind, number in kinds.items())
    return f"; {files} read as plain text"


def _note_on_markers(data: bytes, path: Path) -> str:
    """Return a note on end-of-text tokens that are written as text, or ""."""
    number = data.count(END_OF_TEXT.encode())
    if not number:
        return ""
    command = f"jaxgpt data prepare {quote(str(path))} --separator '{END_OF_TEXT}' --out tokens"
    return f"; {number:,} times {END_OF_TEXT} as ordinary text; to separate documents there: {command}"
