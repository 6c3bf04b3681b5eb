"""Where text comes from: the standard library's sources, a published text, a file or a folder of one's own."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.cache import cache_dir
from jaxgpt.config import DataConfig, UserError
from jaxgpt.data.download import fetch

# Modules that every Python since 3.11 has as plain ASCII source, in the order in which they are read.
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
SHAKESPEARE_SIZE = 1_115_394

# The two questions of StatQuest's decoder-only transformer, each followed by its answer.
STATQUEST = "what is statquest <EOS> awesome <EOS>\nstatquest is what <EOS> awesome <EOS>\n"

# Characters in a dataset's text, known without reading it; the Python sources are read where they stand.
KNOWN_VOCAB = {"shakespeare": 65, "statquest": 5}


@dataclass(frozen=True)
class Text:
    """A text and a line that says what it is."""

    text: str
    source: str


def read_text(config: DataConfig) -> Text:
    """The text that a config asks for.

    Raises:
        UserError: nothing there, empty, not text, or not to be had offline.
    """
    if config.path:
        return read_path(Path(config.path))
    match config.dataset:
        case "python":
            return python_sources()
        case "shakespeare":
            path = cache_dir() / "tinyshakespeare.txt"
            fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, SHAKESPEARE_SIZE, path, flag="--data.path FILE")
            return Text(_read_file(path), f"tinyshakespeare ({path})")
        case "statquest":
            return Text(STATQUEST, "StatQuest's two sentences")
    raise UserError("this preset has no text of its own: give one with --data.path FILE")


def python_sources() -> Text:
    """The sources of a fixed list of standard-library modules, one after the other."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {name: root / f"{name}.py" for name in PYTHON_MODULES if (root / f"{name}.py").is_file()}
    if len(found) < len(PYTHON_MODULES) // 2:
        raise UserError(
            f"Python's own sources are not at {root} ({len(found)} of {len(PYTHON_MODULES)} modules found): "
            f"give a text with --data.path FILE"
        )
    text = "".join(_read_file(path) for path in found.values())
    names = list(found)
    missing = [name for name in PYTHON_MODULES if name not in found]
    source = f"{len(found)} modules of Python's standard library, {names[0]} to {names[-1]}, at {root}"
    return Text(text, source + (f"; without {', '.join(missing)}" if missing else ""))


def read_path(path: Path) -> Text:
    """A text file, or all files of a folder in the order of their names."""
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if path.is_file():
        return Text(_read_file(path), str(path))
    files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
    if not files:
        raise UserError(f"no files in {path}")
    return Text("".join(_read_file(p) for p in files), f"{len(files)} files in {path}")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_file(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if not data:
        raise UserError(f"{path} is empty")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}): a token file must be named .bin") from None
    if "\0" in text:
        raise UserError(f"{path} is not text (a NUL character at {text.index(chr(0))})")
    return text
