"""The horizontal axis of curves: steps, tokens or time of the lines in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Sequence[Mapping[str, Any]]  # the lines of a metrics.jsonl

# Horizontal axes: "all", or a key of AXES, which maps them to fields of metrics.jsonl.
Axis = Literal["all", "step", "tokens", "seconds"]
AXES = {"step": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


class RunAxis(NamedTuple):
    """A horizontal axis for runs.

    Attributes:
        kind: a key of `AXES`.
        unit: number of steps, tokens or seconds in a unit of the axis.
        label: label of the axis.
    """

    kind: str
    unit: int
    label: str

    @staticmethod
    def of(kind: str, runs: Mapping[str, Lines]) -> RunAxis:
        """Return the axis of a kind; for time, in the largest unit below half of the longest run."""
        if kind != "seconds":
            return RunAxis(kind, 1, kind)
        longest = 0.0
        for lines in runs.values():
            _, elapsed = column(lines, "elapsed_seconds")
            longest = max(longest, elapsed.max(initial=0))
        fitting = [unit for unit in UNITS if longest > 2 * unit[0]]
        seconds, name = fitting[0] if fitting else UNITS[-1]
        return RunAxis(kind, seconds, f"time ({name})")

    def place(self, lines: Lines, steps: Any) -> Any:
        """Convert steps of a run to positions on the axis. The training line of step s is recorded after s + 1 steps."""
        if self.kind == "step":
            return steps
        step, values = column(lines, AXES[self.kind])
        return np.interp(steps, [0, *(step + 1)], [0, *(values / self.unit)])

    def draw(self, axes: Axes) -> None:
        """Label the axis; draw a grid."""
        from matplotlib.ticker import EngFormatter

        axes.set_xlabel(self.label)
        if self.kind == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)


def column(lines: Lines, field: str) -> np.ndarray:
    """Return the steps and values of the lines that have a field, `[2, n]`."""
    pairs = [(line["step"], line[field]) for line in lines if field in line]
    return np.array(pairs, float).reshape(-1, 2).T
