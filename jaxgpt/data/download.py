"""Fetch a file once: https, a checksum, a cache. A file is in the cache whole and verified, or not at all.

What has arrived of one that was cut off waits beside it under the name `NAME.part`; the next call asks for the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxgpt.config import UserError

CHUNK = 1 << 16
SLOWEST = 1 << 13  # bytes in a second, on the average of a download; a server that drips is given up


class _NotTheFile(OSError):
    """What arrived is not what was asked for: none of it is kept."""


def fetch(
    url: str, sha256: str, size: int, path: Path, flag: str, timeout: float = 30, schemes: tuple[str, ...] = ("https",)
) -> Path:
    """The file at `path`, downloaded if it is not there or not what it should be.

    Of several processes that want the same file, one downloads it and the others wait.

    Args:
        url: where it is published.
        sha256: its checksum, in hexadecimal.
        size: its length in bytes; a longer answer is cut off and refused.
        path: where it is kept.
        flag: the setting with which a user names a copy of their own; part of the error messages.
        timeout: seconds without an answer, or between two pieces of it.
        schemes: that a URL, and every redirection, may have.

    Raises:
        UserError: unreachable, or not the file that was meant. Nothing is at `path` but a file of this checksum.
    """
    try:
        if path.is_file() and _sha256(path) == sha256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with _alone(part) as out:
            if path.is_file() and _sha256(path) == sha256:  # another process was quicker
                part.unlink(missing_ok=True)
                return path
            _download(url, sha256, size, out, part, timeout, schemes)
            os.replace(part, path)
    except (OSError, ValueError, http.client.HTTPException) as e:
        if isinstance(e, urllib.error.HTTPError):
            e.close()
        reason = e.strerror if isinstance(e, OSError) and e.strerror else getattr(e, "reason", None) or e
        reason = str(reason) or type(e).__name__
        raise UserError(
            f"cannot download {url} to {path} ({' '.join(reason.split())}): give a copy of your own with {flag}"
        ) from None
    return path


def _download(
    url: str, sha256: str, size: int, out: BinaryIO, part: Path, timeout: float, schemes: tuple[str, ...]
) -> None:
    """The whole file in `out`, from where an earlier download left off; verified, and on the disk."""
    there = out.seek(0, os.SEEK_END)
    try:
        if there < size:
            _receive(url, size, out, there, timeout, schemes)
        out.flush()
        if (found := _sha256(part)) != sha256:
            raise _NotTheFile(f"checksum {found[:12]}... instead of {sha256[:12]}...")
        os.fsync(out.fileno())
    except _NotTheFile:
        out.truncate(0)
        if there:  # what lay there may have been of another file: once more, from the start
            _download(url, sha256, size, out, part, timeout, schemes)
        else:
            raise
    finally:
        with contextlib.suppress(OSError):
            out.flush()
        if part.exists() and not part.stat().st_size:
            part.unlink()


def _receive(url: str, size: int, out: BinaryIO, there: int, timeout: float, schemes: tuple[str, ...]) -> None:
    """Append what is missing, as far as the server gives it."""
    _check_scheme(url, schemes)
    opener = urllib.request.build_opener(_SafeRedirect(schemes))
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    deadline = time.monotonic() + timeout + size / SLOWEST
    try:
        answer = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as e:
        if there and e.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _NotTheFile("it has no such rest") from None
        raise
    with answer:
        if there and answer.status == http.client.PARTIAL_CONTENT:
            said = answer.headers.get("Content-Range", "")
            if not re.fullmatch(rf"bytes {there}-{size - 1}/({size}|\*)", said):
                raise _NotTheFile(f"the rest was asked for, and {said or 'no range'} was answered")
        else:
            there = 0  # the server knows nothing of ranges and sends everything
            out.truncate(0)
        while piece := answer.read1(CHUNK):
            there += len(piece)
            if there > size:
                raise _NotTheFile(f"longer than the expected {size:,} bytes")
            out.write(piece)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{there:,} of {size:,} bytes arrived, too slowly")
    if there != size:
        raise OSError(f"{there:,} of {size:,} bytes arrived: the next try goes on from there")


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[BinaryIO]:
    """A file to append to, by one process at a time where the system can tell."""
    while True:
        with part.open("ab") as out:
            with contextlib.suppress(ImportError):
                import fcntl

                fcntl.flock(out, fcntl.LOCK_EX)
                # Who held it before may have moved it to its place, or removed it.
                if not part.exists() or not os.path.samestat(part.stat(), os.fstat(out.fileno())):
                    continue
            yield out
            return


class _SafeRedirect(urllib.request.HTTPRedirectHandler):
    def __init__(self, schemes: tuple[str, ...]) -> None:
        self.schemes = schemes

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        _check_scheme(newurl, self.schemes)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_scheme(url: str, schemes: tuple[str, ...]) -> None:
    if url.split(":", 1)[0].lower() not in schemes:
        raise OSError(f"refused {url}: only {', '.join(schemes)} is followed")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
