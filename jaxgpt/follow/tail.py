"""Tail of a metrics file: the rows of its new lines, as trackers receive them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from jaxgpt.follow.tracker import Row
from jaxgpt.trainer.metrics import parse_line


class Tail:
    """Reads the new complete lines of a metrics file; a resume replaces the file, which is then read from its start.

    Attributes:
        last: the last line; {}: no line yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._head = b""  # first line
        self._clock = Clock()

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the new lines."""
        if self._file is None or self._is_replaced(self._file):
            self.restart()
        if self._file is None:
            return
        while True:
            start = self._file.tell()
            text = self._file.readline()
            if not text.endswith(b"\n"):  # an incomplete line: the remainder is written later
                self._file.seek(start)
                return
            line = parse_line(text)
            if line is not None:
                self.last = line
                row = row_of(line, self._clock.at(line))
                if row:
                    yield row

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def restart(self) -> None:
        """Read the file from its start."""
        self.close()
        self._file = None
        self._clock = Clock()
        self.last = {}
        with suppress(FileNotFoundError):
            self._file = self.path.open("rb")
            self._head = self._file.readline()
            self._file.seek(0)

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Return whether the path is a different file, or was written again from its start."""
        try:
            is_same = os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False
        is_longer = os.fstat(file.fileno()).st_size >= file.tell()
        has_same_head = os.pread(file.fileno(), len(self._head), 0) == self._head
        return not (is_same and is_longer and has_same_head)


class Clock:
    """Computes the time of each line, in seconds since 1970, from the last start of the run and `elapsed_seconds`."""

    def __init__(self) -> None:
        self._started = 0.0  # time of the last start
        self._elapsed = 0.0  # elapsed seconds of the last line
        self._before = 0.0  # elapsed seconds before the last start

    def at(self, line: Mapping[str, Any]) -> float:
        """Return the time of a line; lines must be passed in the order of the file."""
        if "started" in line:
            with suppress(TypeError, ValueError):
                self._started = datetime.fromisoformat(line["started"]).timestamp()
            self._before = self._elapsed
        self._elapsed = line.get("elapsed_seconds", self._elapsed)
        return self._started + self._elapsed - self._before


def row_of(line: Mapping[str, Any], at: float) -> Row | None:
    """Return the finite numbers of a line; None: the line has no numbers, or records a start or an end.

    Numbers of a list, such as one number per layer, get names with their index: `load_entropy/0`.
    """
    if "started" in line or "ended" in line:
        return None
    values = {}
    for name, value in _single_values(line):
        if name != "step" and type(value) in (int, float) and math.isfinite(value):
            values[name] = float(value)
    step = line["step"]
    order = 2 * step + ("loss" in line)
    return Row(step, values, at, order) if values else None


def _single_values(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a line; each value of a list has its own name."""
    for name, value in line.items():
        if isinstance(value, list):
            for index, each in enumerate(value):
                yield f"{name}/{index}", each
        else:
            yield name, value
