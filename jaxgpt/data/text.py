"""Texts: Python's standard library, Tiny Shakespeare and other built-in texts, or a file or directory."""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from shlex import quote
from string import ascii_letters

from jaxgpt.config import DataConfig
from jaxgpt.data.formats import HEAD, LINES, PACKED, STRUCTURED, check_no_arrow, compression
from jaxgpt.data.tokenizer import EOS_NAMES
from jaxgpt.directories import holds_records, list_files, output_kind
from jaxgpt.errors import UserError, plural, reported
from jaxgpt.files import cache_dir, check_kind, fetch

NO_TEXT = "no text is specified: add --data.path FILE"
TEXT_BYTES = 2 * 10**8  # maximum size in bytes of a text, which is read into memory
DOCUMENTS = (*LINES, ".parquet", *PACKED)  # suffixes of files for `jaxgpt data prepare`
MARKER = EOS_NAMES[0]  # end-of-text token of GPT-2, which other programs write into texts
AS_TEXT = STRUCTURED | {".json": "JSON"}  # formats to name in the description of a text
NUMPY = b"\x93NUMPY"  # first bytes of a .npy file

# Modules with ASCII source in every Python since 3.11, in the order of their concatenation.
PYTHON_MODULES = """
abc argparse ast base64 bdb bisect calendar cmd code codecs codeop collections/__init__ colorsys compileall configparser
contextlib copy copyreg csv dataclasses difflib dis doctest enum filecmp fileinput fnmatch genericpath getpass gettext glob
graphlib gzip hashlib hmac html/parser http/client http/cookiejar http/cookies http/server imaplib inspect io ipaddress
json/decoder json/encoder linecache locale logging/__init__ logging/config logging/handlers mailbox mimetypes modulefinder
netrc ntpath numbers operator optparse os pdb pickletools pkgutil plistlib poplib posixpath pprint profile pstats py_compile
pyclbr queue quopri reprlib rlcompleter sched selectors shelve shutil smtplib socket socketserver stat string subprocess
symtable tabnanny tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest/case unittest/mock
unittest/suite urllib/request uuid warnings wave weakref webbrowser zipapp
""".split()

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_CHARACTERS = 65  # number of distinct characters, known without the download

# The two questions of StatQuest's decoder-only transformer, each followed by its answer.
STATQUEST = "what is statquest <EOS> awesome <EOS>\nstatquest is what <EOS> awesome <EOS>\n"

# Each line is a random string and its copy. The string's length varies, so the copy is not at a fixed offset.
REPEATS_LINES = 20_000
REPEATS_LENGTHS = range(5, 26)


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
    """Read the text that `data.path` or `data.dataset` specifies.

    Raises:
        UserError: if the text is missing, empty, too large or not UTF-8, or cannot be downloaded.
    """
    if config.path:
        return read_path(Path(config.path))
    match config.dataset:
        case "python":
            return python_sources()
        case "shakespeare":
            path = cache_dir() / "tinyshakespeare.txt"
            fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, path, flag="--data.path FILE")
            return Text(_read_file(path), f"tinyshakespeare ({path})")
        case "statquest":
            return Text(STATQUEST.encode(), "StatQuest's two sentences")
        case "repeats":
            return Text(repeats().encode(), f"{REPEATS_LINES:,} lines of a random string, written twice")
    raise UserError(NO_TEXT)


def repeats() -> str:
    """Generate lines of a random string and its copy: only the copy is predictable."""
    rng = Random(0)
    lines = []
    for _ in range(REPEATS_LINES):
        (length,) = rng.choices(REPEATS_LENGTHS)
        word = "".join(rng.choices(ascii_letters, k=length))
        lines.append(f"{word}{word}\n")
    return "".join(lines)


def python_sources() -> Text:
    """Concatenate the sources of a fixed list of standard-library modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = {name: root / f"{name}.py" for name in PYTHON_MODULES}
    source = f"{len(paths)} modules of Python's standard library, {min(paths)} to {max(paths)}, at {root}"
    return Text.of({name: _read_file(path) for name, path in paths.items()}, source)


def read_path(path: Path) -> Text:
    """Read a text file, or all visible text files of a directory, sorted by path; skip other files.

    Raises:
        UserError: if a file cannot be read, a single file is not text, or the text is empty or too large.
    """
    if not path.is_dir():
        data = _read_file(path)
        if not data:
            raise UserError(f"{path} is empty: choose a file with text")
        form = AS_TEXT.get(path.suffix.lower(), "")
        note = f"; {form} read as plain text" if form else ""
        return Text(data, f"{path}{note}{_markers(data, path)}")

    kind = output_kind(path)
    if kind not in ("", "run"):
        raise UserError(f"{path} holds no text ({kind}): choose a different --data.path")
    listing = list_files(path)
    parts = dict[str, bytes]()
    size = 0
    others = 0
    records = list[Path]()
    for file in listing.files:
        try:
            data = _read_file(file)
        except NotText:
            data = b""
        if data:
            parts[str(file.relative_to(path))] = data
        elif holds_records(file):
            records.append(file)
        else:
            others += 1
        size += len(data)
        if size > TEXT_BYTES:
            raise _too_large(path)

    skipped = [plural(others, "other file")] if others else []
    skipped += [_records(records, size)] if records else []
    skipped += [listing.note] if listing.note else []
    note = f"; skipped {' and '.join(skipped)}" if skipped else ""
    if not parts:
        fix = "choose a different --data.path"
        if any(file.suffix == ".bin" for file in listing.files):
            fix += ", or rename files of token ids to train.bin and val.bin"
        raise UserError(f"no text files in {path}{note}: {fix}")
    text = Text.of(parts, f"{plural(len(parts), 'text file')} in {path}{note}")
    return replace(text, source=text.source + _markers(text.data, path))


def _records(files: Sequence[Path], text_bytes: int) -> str:
    """Describe the skipped files of records; name one if they are larger than the text, which may be only documentation."""
    number = f"{plural(len(files), 'file')} of records"
    if not text_bytes or sum(file.stat().st_size for file in files) < text_bytes:
        return number
    return f"{number}, larger than the text (to train on records instead: --data.path {quote(str(files[0]))})"


def _markers(data: bytes, path: Path) -> str:
    """Return a note on end-of-text tokens that are written as text, or ""."""
    number = data.count(MARKER.encode())
    if not number:
        return ""
    command = f"jaxgpt data prepare {quote(str(path))} --separator '{MARKER}' --out tokens"
    return f"; {number:,} times {MARKER} as ordinary text; to separate documents there: {command}"


class NotText(UserError):
    """The error for a file that is not plain UTF-8 text."""


def _read_file(path: Path) -> bytes:
    """Read a UTF-8 file, without its byte-order mark; raise `NotText` if the file is not plain text."""
    check_no_arrow(path)
    if path.suffix.lower() in DOCUMENTS:
        raise NotText(f"{path} holds documents or compressed data, not plain text: {_prepare(path)}")
    check_kind(path)
    with reported(f"cannot read {path}"), path.open("rb") as file:
        data = file.read(TEXT_BYTES + 1)

    if compression("", data[:HEAD]):
        raise NotText(f"{path} holds documents or compressed data, not plain text: {_prepare(path)}")
    if data.startswith(NUMPY):
        fix = f"write its ids with numpy.load('{path.name}').astype('uint16').tofile('train.bin')"
        raise NotText(f"{path} is a NumPy array, not text: {fix}")

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
    if not is_complete:
        raise _too_large(path)
    return data.removeprefix(codecs.BOM_UTF8)


def _too_large(path: Path) -> UserError:
    return UserError(f"{path} has more than {TEXT_BYTES:,} bytes of text: {_prepare(path)}")


def _prepare(path: Path) -> str:
    return f"tokenize it with jaxgpt data prepare {quote(str(path))} --out tokens, then use --data.path tokens"
