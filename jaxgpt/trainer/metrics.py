"""Write and read `metrics.jsonl`, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import flax
import jax

import jaxgpt
from jaxgpt.checkpoint.store import Info
from jaxgpt.config import Config, changes
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json, write_atomically
from jaxgpt.parallel.processes import is_leader


class MetricsFile:
    """Append lines to a metrics file and flush each. Only process 0 writes. Use as a context manager.

    Attributes:
        elapsed_seconds: training time up to the last kept line; 0 in a new file.
    """

    def __init__(self, path: Path, last: Info | None = None) -> None:
        """Start a new file, or continue a file from its last checkpoint and drop later lines."""
        path = path if is_leader() else Path(os.devnull)
        self.elapsed_seconds = 0.0
        if last is not None and path.is_file():
            kept = [line for line in read_metrics(path) if _before(line, last.step)]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
            self.elapsed_seconds = max((line.get("elapsed_seconds", 0.0) for line in kept), default=0.0)
        self._file = path.open("a" if last else "w")

    def write(self, **values: Any) -> None:
        """Write a line without non-finite values, which JSON cannot represent."""
        line = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a metrics file, skipping truncated and damaged ones."""
    with path.open("rb") as f:
        for line in f:
            try:
                value = parse_json(line, str(path))
            except UserError:
                continue
            if not isinstance(value, dict) or type(value.get("step")) is not int or value["step"] < 0:
                continue
            numbers = (value.get(name, 0) for name in ("loss", "val_loss", "tokens", "elapsed_seconds"))
            if all(type(number) in (int, float) for number in numbers) and isinstance(value.get("changed", {}), dict):
                yield value


def _before(line: dict[str, Any], step: int) -> bool:
    # A line with the loss of step s is written after its update, one with val_loss before the checkpoint of step s.
    return line["step"] < step or (line["step"] == step and "loss" not in line)


def start_line(config: Config, last: Info | None) -> dict[str, Any]:
    """Return the line that records a start of the run: date, command, machine, versions, and settings changed since `last`."""
    return {
        "step": last.step if last else 0,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "commit": _commit(),
        "host": platform.node(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": versions(),
        "changed": changes(last.config(), config) if last else {},
    }


def versions() -> dict[str, str]:
    """Return the versions that a run depends on, and a digest of this package: checkouts can have equal version numbers."""
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
    """Return the git commit of the current directory, with -dirty if files have changed; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""
