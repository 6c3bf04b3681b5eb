"""Fetch a file once: https, a checksum, a cache. A file is in the cache whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from jaxgpt.config import UserError

CHUNK = 1 << 16


def cache_dir() -> Path:
    """`$JAXGPT_CACHE`, else the user's cache folder."""
    if own := os.environ.get("JAXGPT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"


def fetch(
    url: str, sha256: str, size: int, path: Path, flag: str, timeout: float = 30, schemes: tuple[str, ...] = ("https",)
) -> Path:
    """The file at `path`, downloaded if it is not there or not what it should be.

    Args:
        url: where it is published.
        sha256: its checksum, in hexadecimal.
        size: its length in bytes; a longer answer is cut off and refused.
        path: where it is kept.
        flag: the setting with which a user names a copy of their own; part of the error messages.
        timeout: seconds without an answer, or between two pieces of it.
        schemes: that a URL, and every redirection, may have.

    Raises:
        UserError: unreachable, or not the file that was meant. Nothing is left behind.
    """
    if path.is_file() and _sha256(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = urllib.request.build_opener(_SafeRedirect(schemes))
    temporary: str | None = None
    try:
        _check_scheme(url, schemes)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        with os.fdopen(handle, "wb") as out, opener.open(url, timeout=timeout) as answer:
            received = 0
            while piece := answer.read(CHUNK):
                received += len(piece)
                if received > size:
                    raise OSError(f"longer than the expected {size:,} bytes")
                out.write(piece)
        if received != size:
            raise OSError(f"{received:,} of {size:,} bytes arrived")
        if (found := _sha256(Path(temporary))) != sha256:
            raise OSError(f"checksum {found[:12]}... instead of {sha256[:12]}...")
        os.replace(temporary, path)
        temporary = None
    except (OSError, urllib.error.URLError, ValueError) as e:
        if isinstance(e, urllib.error.HTTPError):
            e.close()
        reason = getattr(e, "reason", None) or e
        raise UserError(f"cannot download {url} to {path} ({reason}): give a copy of your own with {flag}") from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
    return path


class _SafeRedirect(urllib.request.HTTPRedirectHandler):
    def __init__(self, schemes: tuple[str, ...]) -> None:
        self.schemes = schemes

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        _check_scheme(newurl, self.schemes)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_scheme(url: str, schemes: tuple[str, ...]) -> None:
    if url.split(":", 1)[0] not in schemes:
        raise OSError(f"refused {url}: only {', '.join(schemes)} is followed")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
