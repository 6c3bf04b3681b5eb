"""Read, write, lock and download files: strict JSON, atomic writes, one writer per directory.

This module imports only the standard library and `jaxgpt.errors`.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from io import BufferedIOBase, TextIOBase
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from jaxgpt.errors import UserError, did_you_mean, reported, short_repr

JSON_BYTES = 1 << 24  # default size limit of a file to read, in bytes
LOCK = ".lock"  # name of a directory's lock file
TEMPORARY = ".jaxgpt-tmp"  # end of the names of temporary files and directories
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of a file system without locks
_SURROGATES = re.compile(r"\\u[dD][89a-fA-F]")


def cache_dir() -> Path:
    """Return `$JAXGPT_CACHE`, or `jaxgpt` in the user's cache directory.

    Its files are downloaded or compiled again if they are deleted.
    """
    own = os.environ.get("JAXGPT_CACHE")
    if own:
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "jaxgpt"


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


def _replace(target: Path, data: bytes) -> bool:
    """Write a file under a unique name, then rename it; return False if a different process deleted it before.

    The lock shows that this process is alive. Buckets mounted as a directory cannot rename an open file, so the file is
    closed before.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            _try_lock(file)
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
            if _try_lock(file):
                path.unlink()


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk, after a rename, if the file system supports this."""
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def check_renames(directory: Path, shown: Path) -> None:
    """Check that a directory with files can be renamed in `directory`, as a complete checkpoint or model is.

    Raises `UserError`, with the path `shown`, on a bucket that is mounted without this function. A killed process leaves
    names that end in .partial.
    """
    probe = directory / "probe.partial"
    renamed = directory / "renamed.partial"
    try:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)
        (probe / "part").mkdir(parents=True)
        (probe / "part" / "file").write_bytes(b"0")
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


def check_writable(path: Path) -> None:
    """Check that a file can be written, before its content is computed. Raises `UserError` otherwise."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a directory")
    if path.is_file() or not path.exists():  # no check of pipes and devices
        with reported(f"cannot write {path}"), TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically; non-finite numbers raise `ValueError`."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Locked(UserError):
    """A directory is locked by another process."""


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Lock a directory against other writers, until the `with` block or the process ends.

    If the directory is locked, raise `Locked` with the id and host of the locking process, and the time of locking. A
    file system without locks gives no protection.
    """
    path = directory / LOCK
    with reported(f"cannot write to {directory}"):
        file = path.open("a")
    with file:
        try:
            _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text("utf-8", "replace") or "another process"
            raise Locked(f"{directory} is being written by {holder}: wait for it, or stop it") from None
        file.truncate(0)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        with suppress(OSError):  # full disk: the lock holds, and the block may free space
            os.write(file.fileno(), holder.encode())
        try:
            yield
        finally:
            file.truncate(0)


def has_writer(directory: Path) -> bool | None:
    """Return whether a process holds the lock of `sole_writer`; None: it is on another host, and may have been killed.

    The lock itself is not tested: a process that starts meanwhile would find it locked. A writer empties the file at its
    end; if it was killed, the file still has its id.
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
        pass  # it exists, and is of another user
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, and create it if missing; wait while another process holds the lock."""
    with path.open("a") as file:
        _lock(file, fcntl.LOCK_EX)
        yield


def _try_lock(file: BinaryIO) -> bool | None:
    """Lock a file; return False if a different process has locked it, and None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno in NO_LOCKS:
            return None
        raise
    return True


def _lock(file: TextIOBase | BufferedIOBase, operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise


def fetch(url: str, sha256: str, path: Path, flag: str, timeout: float = 30) -> Path:
    """Download a file to `path`, unless `path` already has the checksum `sha256`.

    Concurrent processes wait for the download. The `UserError` of a failed download recommends the option `flag` for a local
    copy. `timeout` is in seconds.
    """
    from http.client import HTTPException  # imported late, because `--help` needs no HTTP
    from urllib.request import urlopen

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock")):
            if path.exists() and sha256_file(path) == sha256:
                return path
            with urlopen(url, timeout=timeout) as response:
                content = response.read()
            if hashlib.sha256(content).hexdigest() != sha256:
                raise OSError("the checksum does not match")
            write_atomically(path, content)
    except (OSError, HTTPException) as e:
        raise UserError(f"cannot download {url} to {path} ({e}): use a local copy with {flag}") from None
    return path


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Read a regular file; raise `UserError` if the file is larger than `limit` bytes or cannot be read."""
    with reported(f"cannot read {path}"):
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read {path}: it is not a file")
        size = path.stat().st_size
        if size > limit:
            raise UserError(f"{path} is too large: {size:,} bytes, at most {limit:,} are allowed")
        return path.read_bytes()


def beside(path: Path | str) -> list[str]:
    """Return all paths in the directory of a path, for `did_you_mean`."""
    return [str(other) for other in Path(path).parent.glob("*")]


def check_kind(path: Path) -> None:
    """Raise `UserError` if a path is neither a file nor a directory, for example, a named pipe, which would block."""
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is neither a file nor a directory: choose a file or a directory")


def missing(path: Path | str, fix: str = "") -> UserError:
    """Return the error for a missing path, with a similar path in the same directory, if any, and `fix`."""
    if Path(path).is_symlink():
        return UserError(f"{path} is a link to a missing file or directory: {Path(path).readlink()}{fix}")
    return UserError(f"no such file or directory: {path}{did_you_mean(str(path), beside(path))}{fix}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise `UserError` if the file is unreadable or not a JSON object."""
    value = parse_json(read_bytes(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def read_own_json(path: Path, fix: str) -> dict[str, Any]:
    """Read a JSON object from a file that only jaxgpt writes; raise `damaged(path, fix)` if it is invalid."""
    content = read_bytes(path)
    try:
        value = parse_json(content, str(path))
    except UserError:
        raise damaged(path, fix) from None
    if not isinstance(value, dict):
        raise damaged(path, fix)
    return value


def damaged(path: Path, fix: str) -> UserError:
    """Return the error for a file that only jaxgpt writes, with other content."""
    return UserError(f"{path} is damaged: {fix}")


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse JSON strictly: raise a `UserError` that begins with `where` for invalid or ambiguous text.

    Rejects duplicate keys, NaN and Infinity, numbers beyond float64, lone surrogates, a byte-order mark, and nesting deeper
    than Python's stack. Integers of 19 characters or more become floats.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_float
        )
        if _SURROGATES.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where}: not valid JSON (nested too deeply)") from None
    except ValueError as e:
        raise UserError(f"{where}: not valid JSON ({e})") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"duplicate key {short_repr(key)}")
        value[key] = item
    return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {short_repr(digits)} is not finite in float64")
    return value
