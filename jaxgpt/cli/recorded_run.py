"""A trained run as `jaxgpt plot` and `jaxgpt compare` read it: its settings and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.config import flat
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run

Lines = Sequence[Mapping[str, Any]]  # lines of the metrics.jsonl of a run


class RecordedRun(NamedTuple):
    """The record of a run.

    Attributes:
        path: directory of the run.
        settings: settings, keyed by dotted name.
        lines: lines of its metrics.jsonl.
    """

    path: Path
    settings: Mapping[str, Any]
    lines: Lines


def read_recorded(runs: Mapping[str, Run]) -> dict[str, RecordedRun]:
    """Read the settings and metrics of runs, keyed by their names on the command line.

    Raises:
        UserError: if a run was not trained, so that it has no metrics.
    """
    from jaxgpt.trainer.metrics import read_metrics

    recorded = {}
    for name, run in runs.items():
        if not run.metrics.is_file():
            raise UserError(f"{name} has no metrics.jsonl: it was imported or saved from Python; choose a trained run")
        recorded[name] = RecordedRun(run.path, flat(run.config()), list(read_metrics(run.metrics)))
    return recorded
