"""Built-in texts: Python's standard library, Tiny Shakespeare, StatQuest's sentences, and repeated random strings."""

from __future__ import annotations

from pathlib import Path
from random import Random
from string import ascii_letters

from jaxgpt.downloads import cache_dir, fetch

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


def fetch_shakespeare() -> Path:
    """Return the path of Tiny Shakespeare in the cache; download the file if it is missing."""
    path = cache_dir() / "tinyshakespeare.txt"
    fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, path, flag="--data.path FILE")
    return path


def repeats() -> str:
    """Generate lines of a random string and its copy: only the copy is predictable."""
    rng = Random(0)
    lines = []
    for _ in range(REPEATS_LINES):
        (length,) = rng.choices(REPEATS_LENGTHS)
        word = "".join(rng.choices(ascii_letters, k=length))
        lines.append(f"{word}{word}\n")
    return "".join(lines)
