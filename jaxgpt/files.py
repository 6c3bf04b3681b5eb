"""Read files of users and of jaxgpt, with a size limit; errors have one line."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError, reported
from jaxgpt.strict_json import parse_json
from jaxgpt.suggestions import did_you_mean

JSON_BYTES = 1 << 24  # default size limit of a file to read, in bytes


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Read a regular file; raise `UserError` if the file is larger than `limit` bytes or cannot be read."""
    with reported(f"cannot read {path}"):
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read {path}: it is not a file; use a regular file")
        size = path.stat().st_size
        if size > limit:
            raise UserError(f"{path} is too large: {size:,} bytes, at most {limit:,} are allowed")
        return path.read_bytes()


def beside(path: Path | str) -> list[str]:
    """Return all paths in the directory of a path, for `did_you_mean`."""
    return [str(other) for other in Path(path).parent.glob("*")]


def check_kind(path: Path) -> None:
    """Raise `UserError` if a path is missing, or is for example a named pipe, which would block.

    Callers with a path of the user first raise `missing`, which suggests a similar path.
    """
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is neither a file nor a directory: choose a file or a directory")


def missing(path: Path | str, fix: str = "") -> UserError:
    """Return the error for a missing path, with a similar path in the same directory, if any, and `fix`."""
    if Path(path).is_symlink():
        return UserError(f"{path} is a link to a missing file or directory: {Path(path).readlink()}{fix}")
    return UserError(f"no such file or directory: {path}{did_you_mean(str(path), beside(path))}{fix}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the user; raise `UserError`, with the reason, if it is unreadable or invalid."""
    value = parse_json(read_bytes(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def read_own_json(path: Path, fix: str) -> dict[str, Any]:
    """Read a JSON object from a file that only jaxgpt writes.

    Raises:
        UserError: if the file cannot be read; `damaged(path, fix)`, if it is invalid.
    """
    content = read_bytes(path)
    try:
        value = parse_json(content, str(path))
    except UserError:
        raise damaged(path, fix) from None
    if not isinstance(value, dict):
        raise damaged(path, fix)
    return value


def damaged(path: Path, fix: str) -> UserError:
    """Return the error for a file with invalid content that only jaxgpt writes, with the advice `fix`."""
    return UserError(f"{path} is damaged: {fix}")
