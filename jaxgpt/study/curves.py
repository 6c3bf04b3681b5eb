"""Curves of a run: the losses, rewards and experts in the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxgpt.study.drawn_runs import Look, Style
from jaxgpt.study.figure import GRAY, drawable
from jaxgpt.study.run_axis import Lines, RunAxis, column
from jaxgpt.trainer.metrics import comparable_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING: Style = {"linewidth": 1, "alpha": 0.4}  # style of training losses next to validation losses
VALIDATION: Style = {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
# Style of comparable evaluations, next to other evaluations.
FULL: Style = {"linestyle": "none", "marker": "D", "markersize": 5}
SAMPLED: Style = {"linewidth": 1.4}  # style of sampled answers
HELD_OUT: Style = {"linestyle": "none", "marker": "o", "markersize": 3.5}  # style of answers to held-out prompts
SMOOTHING = 50  # minimum number of points of a smoothed curve of rollouts
LABEL = 0.045  # height of a baseline label, as a fraction of the axes' height


class Curves(NamedTuple):
    """The losses of a run; each array has a row of steps and a row of values, `[2, n]`.

    Attributes:
        training: training losses.
        partial: validation losses on fewer windows than `full`, or on earlier validation data.
        full: validation losses that are comparable with each other (`comparable_evaluations`).
    """

    training: np.ndarray
    partial: np.ndarray
    full: np.ndarray

    @property
    def has_training(self) -> bool:
        """Whether the run has training losses."""
        return self.training.size > 0

    @property
    def has_validation(self) -> bool:
        """Whether the run has validation losses."""
        return self.partial.size + self.full.size > 0

    @staticmethod
    def of(lines: Lines) -> Curves:
        """Read the losses from the lines of metrics.jsonl."""
        full = comparable_evaluations(lines)
        steps = {line["step"] for line in full}
        partial = [line for line in lines if line["step"] not in steps]
        return Curves(column(lines, "loss"), column(partial, "val_loss"), column(full, "val_loss"))


def draw_losses(axes: Axes, curve: Curves, lines: Lines, horizontal: RunAxis, look: Look, *, with_lowest: bool) -> None:
    """Draw the losses of a run; optionally, write the lowest comparable validation loss next to its point."""
    training_steps, training = curve.training
    style = TRAINING if curve.has_validation else {"linewidth": 1}
    axes.plot(horizontal.place(lines, training_steps), training, **look.style, **style)

    steps, full = curve.full
    x = horizontal.place(lines, steps)
    if curve.partial.size:
        partial_steps, partial = curve.partial
        axes.plot(horizontal.place(lines, partial_steps), partial, **look.style, **VALIDATION)
        axes.plot(x, full, color=look.color, **FULL)
    else:
        axes.plot(x, full, **look.style, **VALIDATION)

    if full.size and with_lowest:
        lowest = full.argmin()
        text = f"{full[lowest]:.3f}"
        axes.annotate(text, (x[lowest], full[lowest]), (0, 8), textcoords="offset points", ha="center")


def draw_layers(axes: Axes, lines: Lines, metric: str, horizontal: RunAxis, look: Look) -> None:
    """Draw the mean of a metric over the layers and, if the metric has a value for each layer, their range."""
    found = [line for line in lines if metric in line]
    if not found:
        return
    x = horizontal.place(lines, np.array([line["step"] for line in found], float))
    value_nL = np.array([np.ravel(line[metric]) for line in found], float)
    axes.plot(x, value_nL.mean(1), **look.style, linewidth=1)
    if value_nL.shape[1] > 1:
        axes.fill_between(x, value_nL.min(1), value_nL.max(1), color=look.color, alpha=0.15, linewidth=0)


def draw_rollouts(axes: Axes, lines: Lines, metric: str, horizontal: RunAxis, look: Look) -> None:
    """Draw a metric of the sampled answers of a run."""
    steps, values = _smoothed(column(lines, metric))
    axes.plot(horizontal.place(lines, steps), values, **look.style, **SAMPLED)


def draw_held_out(axes: Axes, lines: Lines, metric: str, horizontal: RunAxis, look: Look) -> None:
    """Draw a metric of the answers to held-out prompts, with its standard error if every line has it."""
    steps, values = column(lines, metric)
    _, errors = column([line for line in lines if metric in line], f"{metric}_stderr")
    spread = errors if len(errors) == len(values) else None
    axes.errorbar(horizontal.place(lines, steps), values, spread, color=look.color, elinewidth=0.7, **HELD_OUT)


def _smoothed(curve: np.ndarray) -> np.ndarray:
    """Replace groups of neighboring points of a curve `[2, n]` with their medians.

    `SMOOTHING` to `1.5 * SMOOTHING` points remain; last points without a complete group are dropped. A curve of fewer than
    `2 * SMOOTHING` points is unchanged.
    """
    size = max(curve.shape[1] // SMOOTHING, 1)  # points of a group
    whole = curve[:, : curve.shape[1] // size * size]
    medians: np.ndarray = np.median(whole.reshape(2, -1, size), axis=-1)
    return medians


def draw_baselines(axes: Axes, losses: Mapping[str, float], labels: bool = True) -> None:
    """Draw a horizontal line for each loss behind the curves; if `labels`, with a label on the right."""
    for loss in losses.values():
        axes.axhline(loss, color="#9ca3af", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    if not labels:
        return

    low, high = axes.get_ylim()
    height = -math.inf
    for name, loss in sorted(losses.items(), key=lambda item: item[1]):
        height = max(loss, height + LABEL * (high - low))  # at least one label height above the previous label
        axes.annotate(
            drawable(f"{name} {loss:.2f}"), (1, height), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=GRAY, annotation_clip=False,
        )  # fmt: skip
