"""Locks of files and directories: one writer per directory, even after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, Any

from jaxgpt.errors import UserError, reported

LOCK = ".lock"  # name of a directory's lock file
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of a file system without locks


class LockResult(Enum):
    """Result of `try_lock`."""

    LOCKED = "this process holds the lock"
    BUSY = "a different process holds the lock"
    UNSUPPORTED = "the file system has no locks"


class Locked(UserError):
    """A directory is locked by a different process."""


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Lock a directory against other writers, until the `with` block or the process ends.

    If the directory is locked, raise `Locked` with the id and host of the locking process, and the time of locking. A
    file system without locks gives no protection.
    """
    path = directory / LOCK
    with reported(f"cannot write to {directory}"):
        file = path.open("ab")
    with file:
        if try_lock(file) is LockResult.BUSY:
            holder = path.read_text("utf-8", "replace") or "another process"
            raise Locked(f"{directory} is being written by {holder}: wait for it, or stop it")
        file.truncate(0)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        with suppress(OSError):  # full disk: the lock holds, and the block may free space
            os.write(file.fileno(), holder.encode())
        try:
            yield
        finally:
            file.truncate(0)


def has_writer(directory: Path) -> bool | None:
    """Return whether a process holds the lock of `sole_writer`; None: unknown, because the process is on a different host.

    The lock itself is not tested: a process that starts meanwhile would find it locked. A writer empties the file when
    it releases the lock; after the writer is killed, the file still contains the writer's process id.
    """
    try:
        holder = (directory / LOCK).read_text("utf-8", "replace")
    except OSError:
        return False
    found = re.fullmatch(r"process (\d+) on (.+) since .*", holder)
    if not found:
        return False
    number, host = found.groups()
    if host != socket.gethostname():
        return None

    # Signal 0 tests whether a process exists.
    process = int(number)
    if process == os.getpid():  # a killed process in an earlier container of the same name
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process exists, and belongs to a different user
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, and create it if missing; wait while a different process holds the lock."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
        yield


def try_lock(file: IO[Any]) -> LockResult:
    """Lock a file until it is closed, without waiting for a different process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockResult.BUSY
    except OSError as e:
        if e.errno in NO_LOCKS:
            return LockResult.UNSUPPORTED
        raise
    return LockResult.LOCKED
