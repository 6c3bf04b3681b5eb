"""The table of runs that `jaxgpt plot` prints: losses, speeds, and the settings that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from jaxgpt.cli.draw import Lines
from jaxgpt.cli.output import columns

SHOWN = 6  # maximum number of differing settings shown as columns


def table(
    settings: Mapping[str, Mapping[str, Any]],
    metrics: Mapping[str, Lines],
    bytes_per_token: Mapping[str, float],
) -> str:
    """Format a table of runs, the lowest validation loss first. `bytes_per_token` 0: unknown.

    The lowest loss is taken over the comparable evaluations of a run. A column with their number of windows is added if it
    differs between runs, because such losses are not comparable.
    """
    bests = {name: _best(lines) for name, lines in metrics.items()}
    windows = {best.get("val_windows", 0) for best in bests.values() if best}
    first = next(iter(settings.values()))
    differ = [key for key in first if any(each[key] != first[key] for each in settings.values())]

    def loss(name: str) -> float:
        best = bests[name]
        return best["val_loss"] if best else math.inf

    rows = []
    for name in sorted(metrics, key=loss):
        evaluated = _evaluation_cells(bests[name], bytes_per_token[name], with_windows=len(windows) > 1)
        own = {key: str(settings[name][key]) for key in differ[:SHOWN]}
        rows.append({"run": name, **evaluated, "tokens/s": _speed(metrics[name]), **own})

    # Columns without any value are omitted.
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    cells = [[row[head] for head in heads] for row in rows]
    text = columns([heads, *cells])
    more = differ[SHOWN:]
    if more:
        text += f"\nfurther settings that differ: {', '.join(more)}"
    return text


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
