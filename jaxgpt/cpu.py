"""The CPU: its model, its instructions, and the cores that this process may use."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import lru_cache
from pathlib import Path


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_supports(instructions: str) -> bool:
    """Return whether the CPU has an instruction set, such as "amx_bf16" (a flag of /proc/cpuinfo)."""
    return any(line.startswith("flags") and instructions in line.split() for line in cpu_info())


def cpu_kind() -> str:
    """Return an identifier of this CPU model and its instruction set."""
    lines = [line for line in cpu_info() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    about = "\n".join(lines) or platform.processor()
    digest = hashlib.sha256(about.encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


@lru_cache
def cpu_info() -> list[str]:
    """Return the lines of /proc/cpuinfo about the first core; [] if the file does not exist."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return []
    first, *_ = file.read_text("utf-8", "replace").split("\n\n")
    return first.splitlines()
