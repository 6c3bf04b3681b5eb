"""Atomic writes of files, and checks that a file or directory can be written."""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from jaxgpt.errors import UserError, reported
from jaxgpt.locks import LockResult, try_lock

TEMPORARY = ".jaxgpt-tmp"  # end of the names of temporary files and directories


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash or power failure leaves either the old or the new content.

    Strings are encoded as UTF-8. The mode of an existing file is kept, and symlinks are followed. Pipes and devices, such as
    `/dev/null`, are written directly. Several processes can write one file at the same time: the last write remains.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    try:
        _delete_temporaries(target)
        while not _replace(target, data):
            pass
        sync_directory(target.parent)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None  # the caller's path, not the temporary file's


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically; non-finite numbers raise `ValueError`."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _replace(target: Path, data: bytes) -> bool:
    """Write a file under a unique name, then rename it; return False if a different process deleted it before the rename.

    The lock shows that this process is alive. Buckets mounted as a directory cannot rename an open file, so the file is
    closed before the rename.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            try_lock(file)
            if target.exists():
                shutil.copymode(target, temporary)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except FileNotFoundError:
        if target.parent.is_dir():
            return False
        raise
    finally:
        with suppress(OSError):  # renamed or deleted
            temporary.unlink()
    return True


def _delete_temporaries(target: Path) -> None:
    """Delete the temporary files of killed processes: their locks are free."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{TEMPORARY.lstrip('.')}"):
        with suppress(OSError), path.open("rb") as file:  # a directory, or deleted by a different process
            if try_lock(file) is LockResult.LOCKED:
                path.unlink()


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk, after a rename, if the file system supports this."""
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before its content is computed. Raises `UserError` otherwise."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a directory; choose a different name")
    if path.is_file() or not path.exists():  # no check of pipes and devices
        with reported(f"cannot write {path}"), TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass


def check_renames(directory: Path, shown: Path) -> None:
    """Check that `directory` supports renaming a directory with files, which completes each checkpoint or model.

    Raises `UserError`, with the path `shown`, on a mounted bucket without support for such renames. A killed process may
    leave directories with names that end in .partial.
    """
    probe = directory / "probe.partial"
    renamed = directory / "renamed.partial"
    try:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)
        (probe / "part").mkdir(parents=True)
        file = probe / "part" / "file"
        try:
            file.write_bytes(b"0")
        except OSError as e:  # without a path, if the flush fails, such as on a full disk
            raise OSError(e.errno, e.strerror, str(file)) from None
        try:
            probe.rename(renamed)
        except OSError as e:
            raise UserError(
                f"cannot write to {shown}: its file system cannot rename a directory with files ({e.strerror}); mount a "
                f"bucket with gcsfuse --rename-dir-limit 200000, use a bucket with a hierarchical namespace, or choose a "
                f"different directory"
            ) from None
    finally:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)
