"""Files of conversations, preference pairs and prompts: list them, and read their records."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from jaxgpt.data.files.records import read_records
from jaxgpt.data.files.skipped import Skipped, reason_of
from jaxgpt.data.token_files import split_of
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file
from jaxgpt.listing import list_files
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.record_files import holds_records

T = TypeVar("T")


class Files(NamedTuple):
    """The files of records at a path, by split."""

    train: list[Path]
    val: list[Path]  # empty: a fraction of `train` is held out
    unused: list[Path]  # neither for training nor for validation, such as test files

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file; for several files, the SHA-256 of their checksums."""
        sums = [sha256_file(path) for path in (*self.train, *self.val)]
        if len(sums) == 1:
            return sums[0]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def find_files(path: Path) -> Files:
    """List the files of records at a path.

    In a directory, the words train and val (or validation) in the path of a file determine its split, as for token files.
    Files without these words are for training if no file has the word train. If all files have the word val, all are for
    training.
    """
    if not path.is_dir():
        return Files(train=[path], val=[], unused=[])
    by_split: dict[str, list[Path]] = {"train": [], "val": [], "": []}  # "": no word in the path determines the split
    for file in list_files(path).files:
        if holds_records(file):
            joined = Path("-".join(file.relative_to(path).parts))  # the words of directories count, too
            by_split[split_of(joined)].append(file)

    if by_split["train"]:
        return Files(train=by_split["train"], val=by_split["val"], unused=by_split[""])
    if by_split[""]:
        return Files(train=by_split[""], val=by_split["val"], unused=[])
    return Files(train=by_split["val"], val=[], unused=[])


class RecordKind(NamedTuple, Generic[T]):
    """A kind of records: how they are read, and how errors name them.

    Attributes:
        name: name of the records in the plural, such as "conversations".
        read: function of a record (usually a dict) that returns its content; raises `UserError` for an invalid record.
        fields: names of the fields that `read` uses; empty: all fields.
        example: an example of a record, for errors.
    """

    name: str
    read: Callable[[Any], T]
    fields: Collection[str]
    example: str


def check_records(path: Path, kind: RecordKind[Any], on_error: str = "fail") -> None:
    """Check that the records of a path are of a kind, without a tokenizer and a chat template.

    Raises:
        UserError: if there are no records, or a record is unreadable or not of the kind; with `on_error` skip: if no record is
            of the kind.
    """
    skipped = Skipped(on_error)
    files = find_files(path)
    records = read_files([*files.train, *files.val], kind, skipped)
    if next(records, None) is None:
        raise no_records(path, kind, skipped)
    if on_error != "skip":
        deque(records, maxlen=0)  # the first invalid record raises an error


def no_records(path: Path, kind: RecordKind[Any], skipped: Skipped) -> UserError:
    """Return the error for a path without usable records."""
    return UserError(f"{path} has no {kind.name}{skipped}; write one per line, as {kind.example}")


def read_files(
    files: Sequence[Path], kind: RecordKind[T], skipped: Skipped, progress: Progress = NO_PROGRESS
) -> Iterator[tuple[str, T]]:
    """Yield the content of each record of files, with the place of the record, such as "a.jsonl, line 3".

    Args:
        files: files of records.
        kind: kind of the records.
        skipped: receives the records that are unreadable or invalid.
        progress: called with the number of bytes read so far and the total.
    """
    total = sum(path.stat().st_size for path in files)
    earlier = 0  # bytes of the files before the current one
    for path in files:
        for record in read_records(path, kind.fields):
            progress(earlier + record.bytes_read, total)
            if record.error:
                reason = "that end the reading of their file" if record.lost else "unreadable"
                skipped.skip(reason, record.where, record.error)
                continue
            try:
                content = kind.read(record.value)
            except UserError as e:
                skipped.skip(reason_of(e, "of an unknown shape"), record.where, str(e))
                continue
            yield record.where, content
        earlier += path.stat().st_size
