"""Read, write and download files: atomic writes, limits of size, and one-line errors."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from jaxgpt.errors import UserError, did_you_mean, reported
from jaxgpt.locks import LockResult, locked, try_lock
from jaxgpt.strict_json import parse_json

JSON_BYTES = 1 << 24  # default size limit of a file to read, in bytes
TEMPORARY = ".jaxgpt-tmp"  # end of the names of temporary files and directories


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


def check_renames(directory: Path, shown: Path) -> None:
    """Check that a directory with files can be renamed in `directory`, as when a checkpoint or model is complete.

    Raises `UserError`, with the path `shown`, on a mounted bucket without support for such renames. A killed process leaves
    directories with names that end in .partial.
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
        except OSError as e:  # a flush to a full disk has no path
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


def check_writable(path: Path) -> None:
    """Check that a file can be written, before its content is computed. Raises `UserError` otherwise."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a directory; choose a different name")
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
    """Return the error for invalid content of a file that only jaxgpt writes."""
    return UserError(f"{path} is damaged: {fix}")
