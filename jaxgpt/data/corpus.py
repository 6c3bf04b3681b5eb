"""Read text: Python's standard library, a published text, or the user's file or folder."""

from __future__ import annotations

import codecs
import hashlib
import mmap
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from shlex import quote
from string import ascii_letters

from jaxgpt.config import DataConfig, UserError
from jaxgpt.data.kinds import HEAD, Kind, kind_of
from jaxgpt.files import cache_dir, fetch

BLOCK = 1 << 22  # bytes of text to process at once
MAPPED = 1 << 26  # bytes from which a file is mapped instead of read
Progress = Callable[[int, int], None]  # called with (done, total)


def no_progress(done: int, total: int) -> None:
    """Do nothing."""


# Modules that every Python since 3.11 has as ASCII source, in reading order.
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

# The two questions of StatQuest's decoder-only transformer, each followed by its answer.
STATQUEST = "what is statquest <EOS> awesome <EOS>\nstatquest is what <EOS> awesome <EOS>\n"

# Vocabulary sizes that are known without reading the text. Python's sources can always be read.
KNOWN_VOCAB = {("shakespeare", "char"): 65, ("statquest", "word"): 5, ("repeats", "char"): 53}

# Lines of random letters, each written twice. The length varies, so that the copy cannot be found by its distance.
REPEATS_LINES, REPEATS_LENGTHS = 20_000, (5, 25)


@dataclass(frozen=True)
class Text:
    """A text in UTF-8, and a one-line description of its source.

    Attributes:
        data: the text; a large file is mapped, and its pages are dropped after each block.
        source: one-line description.
        files: name and size in bytes of each file whose contents follow one another in the text; empty if it is one file.
    """

    data: bytes | bytearray | mmap.mmap
    source: str
    files: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str:
        """The whole text as a string, which takes up to four times as much memory."""
        return bytes(self.data).decode("utf-8")

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        digest = hashlib.sha256()
        for start in range(0, len(self.data), BLOCK):
            digest.update(self.data[start : start + BLOCK])
            _forget(self.data, start)
        return digest.hexdigest()

    @property
    def characters(self) -> int:
        """Number of characters."""
        return sum(map(len, self.blocks()))

    def blocks(self, begin: int = 0, end: int | None = None, progress: Progress = no_progress) -> Iterator[str]:
        """Yield the text from byte `begin` to `end` in blocks of about `BLOCK` bytes, without splitting a character."""
        data = memoryview(self.data)[begin:end]
        for done, block in decode_blocks(data):
            yield block
            progress(done, len(data))
            _forget(self.data, begin + done)


def _forget(data: bytes | bytearray | mmap.mmap, end: int) -> None:
    """Drop the pages of a mapped file before byte `end` from this process; the kernel may keep them."""
    if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first, last = (max(place, 0) // mmap.PAGESIZE * mmap.PAGESIZE for place in (end - 2 * BLOCK, end))
        if last > first:
            data.madvise(mmap.MADV_DONTNEED, first, last - first)


def decode_blocks(data: memoryview) -> Iterator[tuple[int, str]]:
    """Decode UTF-8 in blocks of about `BLOCK` bytes; yield each with the number of bytes decoded so far.

    Raises:
        UnicodeDecodeError: not UTF-8; its `start` is counted from the start of `data`.
    """
    start = 0
    while start < len(data):
        block = bytes(data[start : start + BLOCK])
        if start + BLOCK < len(data):  # leave out a character that is split by the end of the block
            last = next((i for i in range(1, 5) if block[-i] & 0xC0 != 0x80), 1)
            block = block[:-last]
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UnicodeDecodeError("utf-8", b"", start + e.start, start + e.end, e.reason) from None
        start += len(block)
        yield start, text


def read_text(config: DataConfig) -> Text:
    """Read the text of a config.

    Raises:
        UserError: the text is missing, empty or not UTF-8, or cannot be downloaded.
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
            return Text(repeats().encode(), f"{REPEATS_LINES:,} lines of random letters, each written twice")
    raise UserError("no text is named: add --data.path FILE")


def repeats() -> str:
    """Make random strings, each written twice and followed by a new line; only the second copy can be predicted."""
    rng, (shortest, longest) = Random(0), REPEATS_LENGTHS  # random() gives the same numbers in every version of Python

    def draw(n: int) -> int:
        return int(rng.random() * n)

    words = (
        "".join(ascii_letters[draw(len(ascii_letters))] for _ in range(shortest + draw(longest - shortest + 1)))
        for _ in range(REPEATS_LINES)
    )
    return "".join(f"{word}{word}\n" for word in words)


def python_sources() -> Text:
    """Concatenate the sources of a fixed list of standard-library modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {name: root / f"{name}.py" for name in PYTHON_MODULES if (root / f"{name}.py").is_file()}
    if len(found) < len(PYTHON_MODULES) // 2:
        raise UserError(
            f"the sources of Python's standard library are not at {root} ({len(found)} of {len(PYTHON_MODULES)} modules "
            f"found): name another text with --data.path FILE"
        )
    parts = {name: _read_file(path) for name, path in found.items()}
    names = list(found)
    missing = [name for name in PYTHON_MODULES if name not in found]
    source = f"{len(found)} modules of Python's standard library, {names[0]} to {names[-1]}, at {root}"
    source += f"; without {', '.join(missing)}" if missing else ""
    return Text(b"".join(parts.values()), source, tuple((name, len(part)) for name, part in parts.items()))


def read_path(path: Path) -> Text:
    """Read a text file, or all text files of a folder, sorted by name.

    Raises:
        UserError: the path does not exist, is not text, or is a folder without text files.
    """
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if path.is_file():
        data = _open_file(path)
        if not data:
            raise UserError(f"{path} is empty")
        return Text(data, str(path))
    files = sorted(p for p in path.rglob("*") if p.is_file() and not is_hidden(p.relative_to(path)))
    text, sizes, skipped, convert = bytearray(), list[tuple[str, int]](), Counter[str](), ""
    for file in files:
        try:
            part = _read_file(file)
            text += part
            sizes += [(str(file.relative_to(path)), len(part))] if part else []
            skipped.update([] if part else ["empty"])
        except NotText as e:
            skipped[e.kind.name] += 1
            convert = convert or f"; {e.kind.convert}"
    counts = ", ".join(f"{n} {kind}" for kind, n in skipped.items())
    if not text:
        raise UserError(
            f"no text files in {path}: {counts or 'it is empty'}{convert}" if path.is_dir() else f"{path} is empty"
        )
    source = f"{len(sizes)} text file{'s' * (len(sizes) > 1)} in {path}" + (f"; skipped {counts}" if counts else "")
    return Text(text, source, tuple(sizes))


def is_hidden(path: Path) -> bool:
    """Return whether any part of a path begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


class NotText(UserError):
    """A file is not UTF-8 text."""

    def __init__(self, path: Path, kind: Kind, what: str = "") -> None:
        super().__init__(f"{path} is {what or f'{kind.name}, not plain UTF-8 text'}: {kind.convert}")
        self.kind = kind


def _read_file(path: Path) -> bytes:
    """Read a UTF-8 file, without its byte-order mark.

    Raises:
        NotText: the file is not UTF-8 text.
    """
    data = _open_file(path)
    return data if isinstance(data, bytes) else data[:]


def _open_file(path: Path) -> bytes | mmap.mmap:
    """Read a UTF-8 file without its byte-order mark, or map a large one that has none.

    Raises:
        NotText: the file is not UTF-8 text.
    """
    try:
        with path.open("rb") as f:
            head = f.read(HEAD)
            if kind := kind_of(path, head):
                raise NotText(path, kind)
            f.seek(0)
            if os.fstat(f.fileno()).st_size < MAPPED or head.startswith(codecs.BOM_UTF8):
                data: bytes | mmap.mmap = f.read()
            else:
                data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    nul = False
    try:
        with memoryview(data) as view:
            for done, text in decode_blocks(view):
                nul = nul or "\0" in text
                _forget(data, done)
    except UnicodeDecodeError as e:
        to = quote(str(path.with_suffix(".utf8.txt")))
        convert = (
            f"convert it (iconv -f LATIN1 -t UTF-8 {quote(str(path))} > {to}), or rename a file of token ids to .bin"
        )
        raise NotText(path, Kind("not UTF-8", convert), f"not UTF-8 text (byte {e.start})") from None
    if nul:
        kind = Kind("binary", "use UTF-8 text, or token ids in .bin files")
        raise NotText(path, kind, f"not text (NUL at byte {data.find(bytes(1))})")
    return data.removeprefix(codecs.BOM_UTF8) if isinstance(data, bytes) else data
