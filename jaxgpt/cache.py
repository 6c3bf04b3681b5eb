"""What is kept between runs and can be made again: downloads, and programs that XLA has compiled."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

COMPILED_BYTES = 2 * 2**30  # beyond this, programs that were not used for longest make room


def cache_dir() -> Path:
    """`$JAXGPT_CACHE`, else the user's cache folder."""
    if own := os.environ.get("JAXGPT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"


def keep_compiled() -> None:
    """Have JAX keep what it compiles, and take it from there next time. Before JAX is imported.

    What JAX's own variables say already stands. Programs for a CPU use what that CPU can do, which JAX does not look at
    when it reads one: each kind of CPU has a folder.
    """
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir() / "compiled" / _cpu()),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(COMPILED_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Attention by cuDNN carries a pointer, which would be another one in every process.
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "true",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _cpu() -> str:
    """A short name for this kind of CPU and its instructions."""
    about = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
        about = "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return f"{platform.machine()}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
