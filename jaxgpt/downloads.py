"""Download files with a checksum to the cache of this user; errors have one line."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from jaxgpt.atomic import write_atomically
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file
from jaxgpt.locks import locked


def cache_dir() -> Path:
    """Return `$JAXGPT_CACHE`, or `jaxgpt` in the user's cache directory.

    Its files are downloaded or compiled again if they are deleted.
    """
    own = os.environ.get("JAXGPT_CACHE")
    if own:
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "jaxgpt"


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
