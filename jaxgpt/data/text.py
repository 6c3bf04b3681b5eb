"""The text of a run: a built-in text, or a file or directory, checked to be plain UTF-8 text."""

from __future__ import annotations

import codecs
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
from jaxgpt.data.compressed_files import HEAD, PACKED, compression
from jaxgpt.data.formats import LINES, NUMPY, STRUCTURED, check_no_arrow, how_to_convert_npy
from jaxgpt.data.tokenizer import EOS_NAMES
from jaxgpt.directories import output_kind
from jaxgpt.errors import UserError, plural, reported
from jaxgpt.files import check_kind
from jaxgpt.listing import holds_records, list_files

NO_TEXT = "no text is specified: add --data.path FILE"
TEXT_BYTES = 2 * 10**8  # maximum size in bytes of a text, which is read into memory
DOCUMENTS = (*LINES, ".parquet", *PACKED)  # suffixes of files for `jaxgpt data prepare`
MARKER = EOS_NAMES[0]  # end-of-text token of GPT-2, which other programs write into texts
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
        parts = {name: part if part.endswith(b"\n") else part + b"\n" for name, part in parts.items()}
        return Text(b"".join(parts.values()), source, tuple((name, len(part)) for name, part in parts.items()))

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
        UserError: if the text is missing, empty, too large or not UTF-8, or cannot be downloaded.
    """
    if config.path:
        return read_path(Path(config.path))
    match config.dataset:
        case "python":
            return python_sources()
        case "shakespeare":
            path = fetch_shakespeare()
            return Text(_read_text_file(path), f"tinyshakespeare ({path})")
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
    return Text.of({name: _read_text_file(path) for name, path in paths.items()}, source)


def read_path(path: Path) -> Text:
    """Read a text file, or all visible text files of a directory, sorted by path; skip other files.

    Raises:
        UserError: if a file cannot be read, a single file is not text, or the text is empty or too large.
    """
    return _read_directory(path) if path.is_dir() else _read_single_file(path)


def _read_single_file(path: Path) -> Text:
    """Read a file of text."""
    data = _read_text_file(path)
    if not data:
        raise UserError(f"{path} is empty: choose a file with text")
    form = AS_TEXT.get(path.suffix.lower(), "")
    note = f"; {form} read as plain text" if form else ""
    return Text(data, f"{path}{note}{_note_on_markers(data, path)}")


def _read_directory(path: Path) -> Text:
    """Read the text files of a directory, sorted by path."""
    kind = output_kind(path)
    if kind not in ("", "run"):
        raise UserError(f"{path} holds no text ({kind}): choose a different --data.path")
    listing = list_files(path)
    parts = _read_text_files(path, listing.files)

    skipped = [file for file in listing.files if str(file.relative_to(path)) not in parts]
    size = sum(len(part) for part in parts.values())
    notes = _notes_on_skipped(skipped, size)
    if listing.note:
        notes.append(listing.note)
    note = f"; skipped {' and '.join(notes)}" if notes else ""
    if not parts:
        fix = "choose a different --data.path"
        if any(file.suffix == ".bin" for file in listing.files):
            fix += ", or rename files of token ids to train.bin and val.bin"
        raise UserError(f"no text files in {path}{note}: {fix}")
    text = Text.of(parts, f"{plural(len(parts), 'text file')} in {path}{_note_on_formats(parts)}{note}")
    return replace(text, source=text.source + _note_on_markers(text.data, path))


def _read_text_files(directory: Path, files: Sequence[Path]) -> dict[str, bytes]:
    """Read the non-empty text files of a directory, keyed by their paths in it; raise `UserError` if they are too large."""
    parts = dict[str, bytes]()
    size = 0
    for file in files:
        try:
            data = _read_text_file(file)
        except NotText:
            continue
        size += len(data)
        if size > TEXT_BYTES:
            raise _too_large(directory)
        if data:
            parts[str(file.relative_to(directory))] = data
    return parts


def _notes_on_skipped(files: Sequence[Path], text_bytes: int) -> list[str]:
    """Describe skipped files; include the path of records larger than the text, which may be only their documentation."""
    records = [file for file in files if holds_records(file)]
    notes = []
    if len(files) > len(records):
        notes.append(plural(len(files) - len(records), "other file"))
    if records:
        note = f"{plural(len(records), 'file')} of records"
        if text_bytes and sum(file.stat().st_size for file in records) >= text_bytes:
            note += f", larger than the text (to train on records instead: --data.path {quote(str(records[0]))})"
        notes.append(note)
    return notes


def _note_on_formats(names: Iterable[str]) -> str:
    """Return a note on files of other formats that are read as text, such as "; 30 JSON files read as plain text", or ""."""
    forms = Counter(AS_TEXT.get(Path(name).suffix.lower(), "") for name in names)
    del forms[""]
    if not forms:
        return ""
    return f"; {' and '.join(plural(number, f'{form} file') for form, number in forms.items())} read as plain text"


def _note_on_markers(data: bytes, path: Path) -> str:
    """Return a note on end-of-text tokens that are written as text, or ""."""
    number = data.count(MARKER.encode())
    if not number:
        return ""
    command = f"jaxgpt data prepare {quote(str(path))} --separator '{MARKER}' --out tokens"
    return f"; {number:,} times {MARKER} as ordinary text; to separate documents there: {command}"


class NotText(UserError):
    """The error for a file that is not plain UTF-8 text."""


def _read_text_file(path: Path) -> bytes:
    """Read a UTF-8 file, without its byte-order mark; raise `NotText` if the file is not plain text."""
    check_no_arrow(path)
    if path.suffix.lower() in DOCUMENTS:
        raise _not_plain(path)
    check_kind(path)
    with reported(f"cannot read {path}"), path.open("rb") as file:
        data = file.read(TEXT_BYTES + 1)
    _check_text(data, path)
    if len(data) > TEXT_BYTES:
        raise _too_large(path)
    return data.removeprefix(codecs.BOM_UTF8)


def _check_text(data: bytes, path: Path) -> None:
    """Raise `NotText` if the first bytes of a file (at most `TEXT_BYTES` + 1) are not plain text."""
    if compression("", data[:HEAD]):
        raise _not_plain(path)
    if data.startswith(NUMPY):
        raise NotText(f"{path} is a NumPy array, not text: {how_to_convert_npy(path)}")

    # The last character of a truncated file may be incomplete.
    is_complete = len(data) <= TEXT_BYTES
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=is_complete)
    except UnicodeDecodeError as e:
        raise NotText(
            f"{path} is not UTF-8 text (byte {e.start}): convert it to plain text, or rename a file of token ids to .bin"
        ) from None
    if 0 in data:
        raise NotText(f"{path} is not text (it has a NUL): use plain UTF-8 text, or token ids in .bin files")


def _not_plain(path: Path) -> NotText:
    return NotText(f"{path} holds documents or compressed data, not plain text: {_how_to_prepare(path)}")


def _too_large(path: Path) -> UserError:
    return UserError(f"{path} has more than {TEXT_BYTES:,} bytes of text: {_how_to_prepare(path)}")


def _how_to_prepare(path: Path) -> str:
    """Return the advice to tokenize a file or directory before training."""
    return f"tokenize it with jaxgpt data prepare {quote(str(path))} --out tokens, then use --data.path tokens"
