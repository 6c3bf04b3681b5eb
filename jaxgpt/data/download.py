"""Download a file once with pooch, verify its checksum, and lock out other processes."""

from __future__ import annotations

import logging
from pathlib import Path

from jaxgpt.config import UserError


def fetch(url: str, sha256: str, path: Path, flag: str, timeout: float = 30) -> Path:
    """Return `path`, downloading it if it is missing or does not have this checksum.

    The file is downloaded to a temporary file, which is moved to `path` after its checksum is verified. Other processes that
    need the same file wait.

    Args:
        url: address of the file.
        sha256: checksum in hexadecimal.
        path: where to cache the file.
        flag: option for a local copy, for the error message.
        timeout: seconds to wait for a response.

    Raises:
        UserError: the server cannot be reached, the checksum differs, or the cache cannot be written.
    """
    import pooch
    from filelock import FileLock

    pooch.get_logger().setLevel(logging.ERROR)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            downloader = pooch.HTTPDownloader(timeout=timeout)
            pooch.retrieve(url, f"sha256:{sha256}", path.name, path.parent, downloader=downloader)
    except (OSError, ValueError) as e:  # requests' errors are OSErrors
        raise UserError(f"cannot download {url} to {path} ({_reason(e)}): use a local copy with {flag}") from None
    return path


def _reason(error: OSError | ValueError) -> str:
    """Return a short reason why a download failed."""
    text = str(error)
    if isinstance(error, ValueError) and "hash" in text:
        return "the checksum does not match"
    if "Max retries exceeded" in text:
        return "no connection" if "timed out" not in text else "timed out"
    return getattr(error, "strerror", None) or " ".join(text.split())[:160] or type(error).__name__
