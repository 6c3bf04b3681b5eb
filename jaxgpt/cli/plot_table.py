"""The table of runs that `jaxgpt plot` prints: losses, speeds, and the settings that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgpt.cli.output import columns
from jaxgpt.cli.recorded_run import Lines, RecordedRun

SHOWN = 6  # maximum number of differing settings shown as columns


def table(runs: Mapping[str, RecordedRun], bytes_per_token: Mapping[str, float]) -> str:
    """Format a table of runs, the lowest validation loss first. `bytes_per_token`: keyed by run; 0: unknown.

    The lowest loss is taken over the comparable evaluations of a run. A column with their number of windows is added if it
    differs between runs, because such losses are not comparable.
    """
    bests = {name: _best(run.lines) for name, run in runs.items()}
    windows = {best.get("val_windows", 0) for best in bests.values() if best}
    differing = _differing([run.settings for run in runs.values()])

    def loss(name: str) -> float:
        best = bests[name]
        return best["val_loss"] if best else math.inf

    rows = []
    for name in sorted(runs, key=loss):
        run = runs[name]
        evaluated = _evaluation_cells(bests[name], bytes_per_token[name], with_windows=len(windows) > 1)
        own = {key: str(run.settings[key]) for key in differing[:SHOWN]}
        rows.append({"run": name, **evaluated, "tokens/s": _speed(run.lines), **own})

    # Columns without any value are omitted.
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    cells = [[row[head] for head in heads] for row in rows]
    text = columns([heads, *cells])
    more = differing[SHOWN:]
    if more:
        text += f"\nfurther settings that differ: {', '.join(more)}"
    return text


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that differ between runs."""
    first, *others = settings
    return [name for name in first if any(other[name] != first[name] for other in others)]


def _best(lines: Lines) -> Mapping[str, Any] | None:
    """Return the line of the lowest comparable validation loss; None: the run has no evaluations."""
    from jaxgpt.trainer.metrics import comparable_evaluations

    return min(comparable_evaluations(lines), key=lambda line: line["val_loss"], default=None)


def _evaluation_cells(best: Mapping[str, Any] | None, bytes_per_token: float, with_windows: bool) -> dict[str, str]:
    """Return the cells of an evaluation, keyed by column; a cell is empty if its value is unknown."""
    if best is None:
        return dict.fromkeys(("val loss", "windows", "bits/byte", "step"), "")
    bits = ""
    if bytes_per_token:
        bits = f"{best['val_loss'] / math.log(2) / bytes_per_token:.4f}"
    return {
        "val loss": f"{best['val_loss']:.4f}",
        "windows": f"{best.get('val_windows', 0):,}" if with_windows else "",
        "bits/byte": bits,
        "step": f"{best['step']:,}",
    }


def _speed(lines: Lines) -> str:
    """Return the median tokens per second of a run, or ""."""
    speeds = [line.get("tokens_per_second") for line in lines]
    measured = [speed for speed in speeds if isinstance(speed, float)]
    return f"{statistics.median(measured):,.0f}" if measured else ""
