"""Errors that a command reports in one line, their exit codes, and helpers to format their messages.

This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import errno
import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Exit codes of commands. jaxgpt/signals.py defines two more, UNFINISHED and INTERRUPTED.
FAILED = 1  # failed command
BAD_INPUT = 2  # bad usage or input

MESSAGE_CHARACTERS = 1000  # maximum number of characters to keep of an error message
COMPARED_CHARACTERS = 100  # maximum length of a word to compare with known words; the time grows with its square
# Errors of a full disk or quota, or of a limit on file sizes, with their fixes.
FULL = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "delete files on its file system, or raise your quota there",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
}
MORE_HOST_MEMORY = "use a smaller model or batch, or a machine with more memory"  # fix for `out_of_host_memory`
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_OWN_NOTE = "jaxgpt: "  # beginning of the notes of `add_own_note`

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


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether an error of XLA reports exhausted memory of a device."""
    return "RESOURCE_EXHAUSTED" in str(error)


def out_of_host_memory(error: MemoryError) -> str:
    """Describe exhausted memory of the host."""
    details = one_line(error, 100)
    return f"out of memory on the host ({details})" if details else "out of memory on the host"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean X?)"`, or an empty string if no known word is similar."""
    near = nearest(word, known)
    return f" (did you mean {near[0]}?)" if near else ""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the most similar known word, otherwise the known words that it abbreviates, otherwise []."""
    words = list(known)
    similar = []
    if len(word) < COMPARED_CHARACTERS:
        similar = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    return similar or [each for each in words if is_abbreviation(word, each)]


def is_abbreviation(short: str, name: str) -> bool:
    """Return whether a string has the first letter of each part of a name: lr of learning_rate."""
    letters = "".join(re.findall(r"(?:^|[-_])(.)", name))
    return len(short) > 1 and short == letters


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


def add_own_note(error: BaseException, text: str) -> None:
    """Add a note of jaxgpt to an error that is raised unchanged, such as an error in the user's own code."""
    error.add_note(f"{_OWN_NOTE}{text}")


def own_notes(error: BaseException) -> list[str]:
    """Return the notes of `add_own_note`, without the notes of other libraries, such as JAX."""
    notes = getattr(error, "__notes__", [])  # absent without notes (PEP 678)
    return [note.removeprefix(_OWN_NOTE) for note in notes if note.startswith(_OWN_NOTE)]


def short_repr(value: Any) -> str:
    """Format a value for an error message: its repr, shortened if it is long or deeply nested."""
    return _short.repr(value)
