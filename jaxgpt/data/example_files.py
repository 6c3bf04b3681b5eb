"""Examples of `data.path`, such as conversations or preference pairs: read and encode their files, and hold some out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from jaxgpt.config import DataConfig
from jaxgpt.data.chat.files import Files, RecordKind, find_files, no_records, read_files
from jaxgpt.data.files.skipped import Skipped, UnusableRecord, reason_of
from jaxgpt.data.tokens import Split
from jaxgpt.errors import UserError
from jaxgpt.progress import Progress

R = TypeVar("R")  # record, read but not encoded
T = TypeVar("T")  # encoded example
S = TypeVar("S", bound=Split)


class DoesNotFit(UnusableRecord):
    """The error for a record that leaves no room for an answer, or for a difference between answers, in a window."""

    reason = "that do not fit a window"


class Loaded(NamedTuple, Generic[S]):
    """The examples of `data.path` as splits.

    Attributes:
        train: training data.
        val: validation data, which may be empty.
        note: a one-line description.
        fingerprint: SHA-256 of the files.
    """

    train: S
    val: S
    note: str
    fingerprint: str


class Examples(NamedTuple, Generic[T]):
    """The encoded examples of `data.path`, before any is held out.

    Attributes:
        files: files of the examples, by split.
        train: examples of the training files, at least one.
        val: examples of the validation files.
        skipped: counts of the records that are not used, and of used records that may be wrong.
    """

    files: Files
    train: list[T]
    val: list[T]
    skipped: Skipped


def read_examples(
    data: DataConfig,
    kind: RecordKind[R],
    encode: Callable[[R], T],
    count: Callable[[Skipped, str, R], None],
    progress: Progress,
) -> Examples[T]:
    """Read and encode the records of `data.path`.

    Args:
        data: settings; uses `path` and `on_error`.
        kind: kind of the records.
        encode: function that returns the example of a record; raises `UserError` for a record that cannot be used.
        count: function that adds to a `Skipped` what may be wrong with an encoded record, given its place and the record.
        progress: called with the number of bytes read so far and the total, for the training files and again for the
            validation files.

    Raises:
        UserError: if a file cannot be read or a record cannot be used (unless `data.on_error` is skip), or no training
            example remains.
    """
    path = Path(data.path)
    files = find_files(path)
    skipped = Skipped(data.on_error)

    def encoded(paths: Sequence[Path]) -> list[T]:
        examples = []
        for where, record in read_files(paths, kind, skipped, progress):
            try:
                example = encode(record)
            except UserError as e:
                skipped.skip(reason_of(e, "that cannot be encoded"), where, str(e))
                continue
            examples.append(example)
            count(skipped, where, record)
        return examples

    train = encoded(files.train)
    val = encoded(files.val)
    if not train:
        raise no_records(path, kind, skipped)
    return Examples(files, train, val, skipped)


class Splits(NamedTuple, Generic[T]):
    """Examples by split."""

    train: list[T]
    val: list[T]  # excludes examples that are also in `train`
    copies: int  # number of validation examples that were omitted, because they are also training examples


def hold_out(examples: Examples[T], fraction: float, key: Callable[[T], Hashable]) -> Splits[T]:
    """Hold out the last examples, unless there are files for validation.

    Args:
        examples: examples by the split of their file.
        fraction: leading fraction of the examples to train on (`data.train_fraction`).
        key: function that returns an equal value for equal examples.
    """
    train = examples.train
    val = examples.val
    if not examples.files.val:
        n = max(int(fraction * len(train)), 1)
        val = train[n:]
        train = train[:n]
    seen = {key(example) for example in train}
    held_out = [example for example in val if key(example) not in seen]
    return Splits(train, held_out, copies=len(val) - len(held_out))
