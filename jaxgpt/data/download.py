"""Download a file once, by pooch: with a checksum, and one process at a time."""

from __future__ import annotations

import logging
from pathlib import Path

from jaxgpt.config import UserError


def fetch(url: str, sha256: str, path: Path, flag: str, timeout: float = 30) -> Path:
    """Return `path`, downloading it if it is missing or does not have this checksum.

    A download goes to a temporary file, which is moved to `path` once its checksum is verified. Other processes that want
    the same file wait for the first.

    Args:
        url: where the file is published.
        sha256: its checksum, in hexadecimal.
        path: where it is cached.
        flag: the option that names a local copy instead, for the error message.
        timeout: seconds without an answer.

    Raises:
        UserError: the server cannot be reached, sends another file, or the cache cannot be written.
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
        raise UserError(f"cannot download {url} to {path} ({_reason(e)}): name a local copy with {flag}") from None
    return path


def _reason(error: OSError | ValueError) -> str:
    """Say in a few words why a download failed."""
    text = str(error)
    if isinstance(error, ValueError) and "hash" in text:
        return "the file has another checksum than expected"
    if "Max retries exceeded" in text:
        return "no connection" if "timed out" not in text else "timed out"
    return getattr(error, "strerror", None) or " ".join(text.split())[:160] or type(error).__name__
