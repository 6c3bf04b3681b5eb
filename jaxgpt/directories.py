"""Directories of data: list the visible files; skip runs, exported models, token ids and logs; find files of records.

This module imports only the standard library and `jaxgpt.errors`.
"""

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

from jaxgpt.errors import UserError, plural, reported

INDEX = "index.json"  # index of a directory of `jaxgpt data prepare`
PREPARED = "jaxgpt token shards"  # beginning of the kind of an index, for every version
# Drafts in the directory of a run, see checkpoint/replacement.py.
NEW = ".new"
REPLACED = ".replaced"
# Files of a run. config.json is moved out first and moved in last: a directory with a config.json contains a complete run.
RUN_NEEDED = ("config.json", "tokenizer.json", "checkpoints")
# Files of a tokenizer next to its tokenizer.json.
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # directory
OF_TOKENIZER = (GENERATION, TOKENIZER, MAP, ADDED, TEMPLATE, TEMPLATES)
TRACKERS = "trackers"  # directory with a subdirectory for each tracker, of `jaxgpt follow`
PROFILE = "profile"  # directory of the traces of `jaxgpt train --profile`
SAMPLES = "samples.jsonl"  # answers of each evaluation, with their rewards
EVALUATION = "evaluation.json"  # loss of each window in the last evaluation
RESULTS = ("metrics.jsonl", EVALUATION, "baselines.json", "tasks.json", SAMPLES, "loss.png")
RUN_FILES = (*RUN_NEEDED, *OF_TOKENIZER, *RESULTS, TRACKERS, PROFILE)
PACKED = (".gz", ".xz", ".bz2", ".zst")  # suffixes of compressed files
RECORDS = (".jsonl", ".ndjson", ".parquet")  # suffixes of files with a record per line or row
DOCUMENTATION = (".md", ".json", "")  # suffixes of other files in a directory of records, such as README.md and LICENSE
# Descriptions of a data set, as the library datasets writes them.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
LOG = re.compile(r".*\.log|nohup\.out|slurm-.*\.(out|err)", re.IGNORECASE)  # names of logs, which grow during a run
HEAD = 1 << 16  # bytes of a JSON file that show its layout
# The beginning of an array of objects, or of an object with a first line that ends with a brace or has no end in these bytes.
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
    skipped = Counter[str]()
    files = [*_walk(directory, directory.resolve(), skipped, set())]
    logs = [file for file in files if LOG.fullmatch(file.name)]
    others = [file for file in files if not LOG.fullmatch(file.name)]
    are_text = len(logs) > len(others) and _bytes(logs) > _bytes(others)  # such as archives of chats
    if logs and not are_text:
        skipped["log"] = len(logs)
        files = others
    return Listing(tuple(files), dict(skipped))


def _bytes(files: Sequence[Path]) -> int:
    """Return the size of all files in bytes; a file that has been deleted meanwhile counts as 0."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def output_kind(directory: Path) -> str:
    """Return what a directory holds if its files are not text, such as "run"; "" for other directories.

    Raises:
        UserError: if the directory cannot be read.
    """
    if is_prepared(directory):
        return "directory of token ids"
    if _holds_run(directory):
        return "run"
    with reported(f"cannot read {directory}"):
        has_config = any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))
    if has_config and any(directory.glob("*.safetensors")):
        return "exported model"
    return ""


def is_prepared(directory: Path) -> bool:
    """Return whether a directory has an index of `jaxgpt data prepare`, of any version."""
    head = b""
    with suppress(OSError), (directory / INDEX).open("rb") as file:
        head = file.read(200)  # the kind is the first entry
    return f'"kind": "{PREPARED}'.encode() in head


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
        for file in _walk(path, path.resolve(), Counter(), set()):
            if _is_records(file):
                found = True
            elif file.suffix.lower() not in DOCUMENTATION and not LOG.fullmatch(file.name):
                return False
    except UserError:  # the reader of the directory reports the error
        return False
    return found


def _is_records(path: Path) -> bool:
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


def _walk(directory: Path, root: Path, skipped: Counter[str], seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the files below a directory; `root` is the resolved path of the whole tree."""
    with reported(f"cannot read {directory}"):
        status = directory.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            return
        seen.add(identity)
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))

    own = RUN_FILES if _holds_run(directory) else ()
    for path in paths:
        if path.name in own:
            continue
        if not path.is_dir():
            if _receives_output(path):
                skipped["output file"] += 1
            elif path.is_file():
                yield path
            continue
        if path.is_symlink() and _is_read_anyway(path.resolve(), root):
            continue
        kind = output_kind(path)
        if kind:
            skipped[kind] += 1
        else:
            yield from _walk(path, root, skipped, seen)


def _receives_output(path: Path) -> bool:
    """Return whether the output of this process is redirected to a file, as by `> train.txt`."""
    for descriptor in (1, 2):
        with suppress(OSError):  # a closed descriptor, or a file that has been removed
            output = os.fstat(descriptor)
            if stat.S_ISREG(output.st_mode) and os.path.samestat(output, path.stat()):
                return True
    return False


def _holds_run(directory: Path) -> bool:
    """Return whether a directory holds a run, or the draft of a run that is created or replaced."""
    with reported(f"cannot read {directory}"):
        if (directory / "config.json").is_file() and (directory / "checkpoints").is_dir():
            return True
        return any((directory / draft / "checkpoints").is_dir() for draft in (NEW, REPLACED))


def _is_read_anyway(target: Path, root: Path) -> bool:
    """Return whether a link would lead to a parent of the tree, or to a visible directory inside the tree."""
    if root.is_relative_to(target):
        return True
    if not target.is_relative_to(root):
        return False
    return not any(part.startswith(".") for part in target.relative_to(root).parts)
