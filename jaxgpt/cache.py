"""What is kept between runs and can be made again: downloads, and programs that XLA has compiled."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

COMPILED_BYTES = 2 * 2**30  # beyond this, programs that were not used for longest make room


def cache_dir() -> Path:
    """`$JAXGPT_CACHE`, else the user's cache folder."""
    if own := os.environ.get("JAXGPT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"


def keep_compiled() -> None:
    """Have JAX keep what it compiles, and take it from there next time. Before JAX is imported.

    What JAX's own variables say already stands. A size limit is set only for our own folder: JAX notes when a program was
    used only where there is a limit, and warns of every program without that note, as others leave it.
    Programs for a CPU use what that CPU can do, which JAX does not look at when it reads one: each kind of CPU has a
    folder. Nor does it look at what it runs: JAX compresses programs, by zstandard where that is installed, and only
    zlib, its other way, has a checksum and refuses a changed byte.
    """
    sys.modules.setdefault("zstandard", None)  # type: ignore[arg-type]
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Attention by cuDNN carries a pointer, which would be another one in every process.
    os.environ.setdefault("JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY", "true")
    own, limit = str(cache_dir() / "compiled" / _cpu()), str(COMPILED_BYTES)
    if os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", own) != own:
        return
    if os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", limit) == limit:
        _remove_cut_off(Path(own))


def _remove_cut_off(folder: Path) -> None:
    """Delete programs whose writer was killed: those without the time of their use, which is written after them.

    JAX never writes a program again that is there: it would warn of one for ever, and up to 0.10 could add no others.
    """
    if any(_cut_off(folder)):
        from filelock import FileLock

        with FileLock(folder / ".lockfile"):  # JAX's own: what is being written now is not cut off
            for path in _cut_off(folder):
                path.unlink()


def _cut_off(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*-cache"):
        if not path.with_name(path.name.removesuffix("cache") + "atime").exists():
            yield path


def _cpu() -> str:
    """A short name for this kind of CPU and its instructions."""
    about = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
        about = "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return f"{platform.machine()}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
