"""The cache of compiled programs."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.files import cache_dir

COMPILED_BYTES = 2 * 2**30  # beyond this size, the least recently used programs are deleted


def keep_compiled() -> None:
    """Enable JAX's compilation cache. Call this before JAX is imported.

    JAX's own environment variables take precedence. A size limit is set only for our own directory: with a limit, JAX
    records when each program was last used, and warns about programs without that record, as written without a limit.
    Compiled CPU programs use the instructions of that CPU, which JAX does not check when it loads one, so each kind of CPU
    has its own directory. JAX does not verify programs either: it compresses them with zstandard if installed, otherwise
    with zlib. zstandard is hidden here because only zlib's format has a checksum, which detects damage.
    """
    sys.modules.setdefault("zstandard", None)  # type: ignore[arg-type]
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # cuDNN attention has a pointer in its cache key, which differs between processes.
    os.environ.setdefault("JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY", "true")
    own, limit = str(cache_dir() / "compiled" / cpu_kind()), str(COMPILED_BYTES)
    if os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", own) != own:
        return
    if os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", limit) == limit:
        _remove_cut_off(Path(own))


def _remove_cut_off(folder: Path) -> None:
    """Delete programs whose writer was killed. They lack the time of last use, which is written after the program.

    JAX never overwrites a cached program. It would warn about such a program in every process, and up to version 0.10 it
    could not add any others.
    """
    if any(_cut_off(folder)):
        from filelock import FileLock

        with FileLock(folder / ".lockfile"):  # JAX's lock: excludes programs that are being written
            for path in _cut_off(folder):
                path.unlink()


def _cut_off(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*-cache"):
        if not path.with_name(path.name.removesuffix("cache") + "atime").exists():
            yield path


def cpu_kind() -> str:
    """Return a short name for this kind of CPU and its instruction set."""
    about = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
        about = "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return f"{platform.machine()}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
