"""One writer per folder: a lock that is released when its holder dies, by kill -9 and power cuts too.

Not filelock's: in many of its releases a second process erases the holder's name, or the lock file of a renamed folder
stays; and without flock it falls back by default to a file that outlives a killed process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from jaxgpt.errors import UserError

NAME = ".lock"
UNSUPPORTED = (
    errno.ENOLCK,
    errno.ENOTSUP,
    errno.ENOSYS,
)  # a file system without locks: other writers cannot be excluded


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder.

    The kernel holds the lock (flock), the file only names its holder. It is removed at the end, even if the folder has
    been renamed. A file left behind by a killed process is not locked.

    Raises:
        UserError: another process holds the lock; its id, host and start time are named.
    """
    file = _acquire(folder / NAME)
    directory = os.open(folder, os.O_RDONLY)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(file, 0)
        os.write(file, json.dumps(holder).encode())
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(NAME, dir_fd=directory)
        os.close(directory)
        os.close(file)


def _acquire(path: Path) -> int:
    while True:
        file = _open(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise UserError(f"{path.parent} is being written by {_holder(path)}: wait for it, or stop it") from None
        except OSError as e:
            if e.errno not in UNSUPPORTED:
                raise
        if path.exists() and os.fstat(file).st_ino == path.stat().st_ino:
            return file
        os.close(file)  # its holder removed it after we opened it: the file that we locked is no longer the lock


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise UserError(f"cannot write to {path.parent}: {e.strerror}") from None


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it has not written its name yet
