"""Versions of the packages that a run depends on."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import flax
import jax

import jaxgpt


def versions() -> dict[str, str]:
    """Return versions by name. Checkpoints record the versions, which must be equal in all processes of a run."""
    return {
        "jaxgpt": jaxgpt.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "code": _code(),
    }


def _code() -> str:
    """Compute a digest of the package's own files: two checkouts can have the same version number."""
    home, digest = Path(jaxgpt.__file__).parent, hashlib.sha256()
    for file in sorted(home.rglob("*.py")):
        digest.update(file.relative_to(home).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
