"""Write and read `metrics.jsonl`, one JSON object per line.

JAX is imported only to write a file, so that `jaxgpt follow` reads files without JAX.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxgpt.atomic import write_atomically
from jaxgpt.directories import METRICS
from jaxgpt.errors import UserError
from jaxgpt.strict_json import parse_json

if TYPE_CHECKING:
    from jaxgpt.checkpoint.info import Info

# Names of entries that the training loop adds to a line. The sums of an objective must have different names, even after an
# evaluation adds the prefix `val_` to the names.
HOST_METRICS = """
    step lr load_entropy largest_share tokens elapsed_seconds tokens_per_second mfu data_wait_seconds device_memory_bytes
    val_loss val_stderr val_windows val_seconds val_data changed seconds_left ended stderr windows seconds data
""".split()
# How a run ended, in the last line of its file. A run that was killed has no such line.
Ended = Literal["finished", "stopped", "failed"]


class MetricsFile:
    """Context manager: append lines to a metrics file and flush each line; only process 0 writes.

    Attributes:
        elapsed_seconds: training time up to the last kept line; 0 in a new file, and outside process 0.
    """

    def __init__(self, path: Path, last: Info | None = None) -> None:
        """Start a new file, or continue a file from the checkpoint `last` and drop later lines."""
        from jaxgpt.parallel.processes import is_leader

        path = path if is_leader() else Path(os.devnull)
        self.elapsed_seconds = 0.0
        if last is not None and path.is_file():
            kept = _lines_before(last, read_metrics(path))
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
            self.elapsed_seconds = max((line.get("elapsed_seconds", 0.0) for line in kept), default=0.0)
        self._path = path
        self._file = path.open("a" if last else "w", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Write a line without non-finite values, which JSON cannot represent."""
        line = {k: v for k, v in values.items() if not isinstance(v, float | list) or np.isfinite(v).all()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def end(self, step: int, ended: Ended) -> None:
        """Write the last line of the run: the number of steps taken, and how the run ended."""
        self.write(step=step, ended=ended)

    def reopen(self) -> None:
        """Continue in a new file at the same path, after the directory of the run was renamed or deleted, and created again."""
        self._file.close()
        self._file = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lines_before(last: Info, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines to keep if a run continues from the checkpoint `last`, with their `val_data`."""
    kept = []
    for line in lines:
        # The checkpoint of step s precedes update s: keep the val_loss of step s, but drop the loss of step s.
        is_later = line["step"] > last.step or (line["step"] == last.step and "loss" in line)
        # An evaluation that the checkpoint does not record is repeated.
        is_repeated = last.ranking is None and line["step"] == last.step and "val_data" in line
        if is_later or is_repeated:
            continue
        # Version 0.1.0 recorded no `val_data`; the data of its runs did not change.
        if "val_loss" in line and "data" in last.about:
            line = {**line, "val_data": line.get("val_data", last.about["data"])}
        kept.append(line)
    return kept


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a metrics file; skip truncated and damaged lines."""
    with path.open("rb") as f:
        for line in f:
            value = parse_line(line)
            if value is not None:
                yield value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a metrics file; None: the line is truncated or damaged."""
    try:
        value = parse_json(line, METRICS)
    except UserError:
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int or value["step"] < 0:
        return None
    names = ("loss", "val_loss", "tokens", "elapsed_seconds")
    has_numbers = all(type(value.get(name, 0)) in (int, float) for name in names)
    has_changes = isinstance(value.get("changed", {}), dict)
    return value if has_numbers and has_changes else None


def how_ended(lines: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Return how the last process of a run ended: finished, stopped or failed; "": the process was killed, or still trains.

    Earlier versions wrote no line at the end: their runs have finished if the model was evaluated after the last of `steps`.
    """
    last = lines[-1] if lines else {}
    if "ended" in last:
        return str(last["ended"])
    is_complete = "val_data" in last and last["step"] == steps
    return "finished" if is_complete else ""


def evaluations(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines with a validation loss."""
    return [line for line in lines if isinstance(line.get("val_loss"), (int, float))]


def comparable_evaluations(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines with a validation loss that are comparable with each other.

    Comparable evaluations have the same validation data as the last evaluation: a resumed run may have changed its mixture.
    They also have the largest number of windows: with `train.eval_windows`, evaluations before the last use fewer windows.
    """
    evaluated = evaluations(lines)
    data = evaluated[-1].get("val_data") if evaluated else None
    same = [line for line in evaluated if line.get("val_data") == data]
    most = max((line.get("val_windows", 0) for line in same), default=0)
    return [line for line in same if line.get("val_windows", 0) == most]
