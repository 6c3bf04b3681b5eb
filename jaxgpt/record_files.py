"""Files of records, such as conversations: recognize them by name, and JSON files by their beginning."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from jaxgpt.errors import UserError
from jaxgpt.listing import FileTree, is_log

PACKED = (".gz", ".xz", ".bz2", ".zst")  # suffixes of compressed files
RECORDS = (".jsonl", ".ndjson", ".parquet")  # suffixes of files with a record per line or row
DOCUMENTATION = (".md", ".json", "")  # suffixes of other files in a directory of records, such as README.md and LICENSE
# Descriptions of a data set, as the library `datasets` writes them.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
HEAD = 1 << 16  # bytes of a JSON file that show its layout
# Beginning of an array of objects, or an object in one line, which ends with a brace or has no line break in `HEAD` bytes.
JSON_RECORDS = re.compile(rb"\s*(\[\s*\{|\{[^\n]*(\}\s*\n|\Z))")


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
        for file in FileTree(path).files(path):
            if _is_records(file):
                found = True
            elif file.suffix.lower() not in DOCUMENTATION and not is_log(file):
                return False
    except UserError:  # the reader of the directory reports the error
        return False
    return found


def _is_records(path: Path) -> bool:
    """Return whether a file holds records: by its name and, if it is uncompressed JSON, its beginning."""
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
    return bool(JSON_RECORDS.match(head.removeprefix(codecs.BOM_UTF8)))
