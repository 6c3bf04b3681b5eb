"""Errors that a command reports in one line, the exit codes of commands, and the format of messages.

This module imports only the standard library.
"""

from __future__ import annotations

import errno
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Exit codes of commands.
FAILED = 1  # failed command
BAD_INPUT = 2  # bad usage or input
UNFINISHED = 75  # stopped training run that can be resumed (EX_TEMPFAIL)
INTERRUPTED = 130  # end by SIGINT, number 2: 128 + 2, as in shells

MESSAGE_CHARACTERS = 1000  # maximum number of characters to keep of an error message
# Errors of a full disk or quota, or of a limit on file sizes, with their fixes.
FULL = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "delete files on its file system, or raise your quota there",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
}
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


class TrainingFailed(RuntimeError):
    """An error despite valid input, such as a failed write. Commands print the message in one line."""

    exit_code = FAILED


class WriteFailed(TrainingFailed):
    """A checkpoint could not be written; `cause` is an `OSError` with the error number, if known."""

    def __init__(self, reason: str, number: int | None) -> None:
        super().__init__(f"a checkpoint could not be written ({reason})")
        self.cause = OSError(number, reason)


class UserError(ValueError):
    """An error that the user can fix. Commands print the message in one line.

    The message states the problem, the value and the fix. The message is always one line: control characters are
    escaped, and long messages are shortened in the middle.
    """

    exit_code = BAD_INPUT

    def __init__(self, message: str) -> None:
        line = printable(message)
        half = MESSAGE_CHARACTERS // 2
        if len(line) > 2 * half:
            line = f"{line[:half]} ... {line[-half:]}"
        super().__init__(line)


class FullDisk(UserError):
    """A write that failed because a disk or quota is full or a file is too large: the input was valid."""

    exit_code = FAILED


def printable(text: str) -> str:
    """Return a text with escapes instead of control characters, line breaks and bytes that are not UTF-8.

    Python represents the non-UTF-8 bytes of a file name as unpaired surrogates, which cannot be written as UTF-8.
    """
    return _BREAKS.sub(lambda match: repr(match[0])[1:-1], text)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` that begins with `what`, such as "cannot read a.txt"."""
    try:
        yield
    except OSError as e:
        message = f"{what}: {e.strerror or e}"
        fix = full_disk_fix(e)
        if fix:
            raise FullDisk(f"{message}; {fix}") from None
        raise UserError(message) from None


def full_disk_fix(error: OSError) -> str:
    """Return the fix for a write that failed because a disk or quota is full or a file is too large; otherwise ""."""
    return FULL.get(error.errno or 0, "")


def one_line(text: object, limit: int = MESSAGE_CHARACTERS) -> str:
    """Return a text, such as the message of an exception, in one line of at most `limit` characters."""
    return " ".join(str(text).split())[:limit]


def plural(number: int, noun: str) -> str:
    """Return a number and its noun, as in "1 window", "1,200 windows", "2 batches" and "2 directories of text"."""
    if number == 1:
        return f"1 {noun}"
    noun, of, others = noun.partition(" of ")
    stem = re.sub("(?<![aeiou])y$", "ie", noun)
    ending = "es" if re.search("(s|x|tch|sh)$", noun) else "s"
    return f"{number:,} {stem}{ending}{of}{others}"


def short_repr(value: Any) -> str:
    """Format a value for an error message: its repr, shortened if it is long or deeply nested."""
    return _short.repr(value)
