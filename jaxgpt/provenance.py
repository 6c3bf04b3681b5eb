"""Provenance of a result: versions, commit, command and machine."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import flax
import jax

import jaxgpt


def provenance() -> dict[str, Any]:
    """Return date, command, directory, commit, machine and versions of this process."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "commit": _commit(),
        "host": platform.node(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of jaxgpt, JAX, Flax and Python, and a digest of jaxgpt's code.

    The digest is needed because different checkouts can have equal version numbers.
    """
    files = sorted(Path(jaxgpt.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "jaxgpt": jaxgpt.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "code": code.hexdigest()[:16],
    }


def _commit() -> str:
    """Return the current directory's git commit, with -dirty if tracked files changed; "" if git fails."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return ""
