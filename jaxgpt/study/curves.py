"""Curves of runs: the losses, rewards and experts in metrics.jsonl, on an axis of steps, tokens or time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxgpt.study.figure import GRAY, drawable, shortened
from jaxgpt.trainer.metrics import comparable_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]  # the lines of a metrics.jsonl
Style = Mapping[str, Any]  # keyword arguments of matplotlib for a line

LABEL = 0.045  # height of a baseline label, as a fraction of the axes' height
COLORS = "#3069b3 #d07a2d #3c8c5f #9a4f9e #8a6d3b #c04a4a #4aa3a8 #6b7280".split()  # colors of runs
SETTING_CHARACTERS = 40  # maximum length of the label of a setting
TRAINING: Style = {"linewidth": 1, "alpha": 0.4}  # style of training losses next to validation losses
VALIDATION: Style = {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
# Style of evaluations on the most windows, next to evaluations on fewer windows.
FULL: Style = {"linestyle": "none", "marker": "D", "markersize": 5}
SAMPLED: Style = {"linewidth": 1.4}  # style of sampled answers
# Style of answers to held-out prompts.
HELD_OUT: Style = {"linestyle": "none", "marker": "o", "markersize": 3.5}
CHANGE: Style = {"linewidth": 0.8, "linestyle": ":"}  # style of changes of settings in a resumed run
# Horizontal axes: "all", or a key of AXES, which maps them to fields of metrics.jsonl.
Axis = Literal["all", "step", "tokens", "seconds"]
AXES = {"step": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
SMOOTHING = 50  # approximate number of points of a curve of rollouts


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


class Change(NamedTuple):
    """The settings that a resumed run changed at a step."""

    run: str
    step: int
    text: str


class Look(NamedTuple):
    """The color and the dash pattern of a run."""

    color: str
    dash: str

    @property
    def style(self) -> Style:
        """Keyword arguments of matplotlib for a line."""
        return {"linestyle": self.dash, "color": self.color}


class DrawnRuns(NamedTuple):
    """Runs that share a figure.

    Attributes:
        lines: the lines of metrics.jsonl, keyed by run.
        looks: the look of each run.
        changes: the changes of settings of all runs.
    """

    lines: Mapping[str, Lines]
    looks: Mapping[str, Look]
    changes: Sequence[Change]

    @staticmethod
    def of(runs: Mapping[str, Lines]) -> DrawnRuns:
        """Assign a color to every run; after eight runs, the colors repeat with a different dash pattern."""
        looks = {}
        styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), COLORS))
        for name, (dash, color) in zip(runs, styles, strict=False):
            looks[name] = Look(color, dash)
        return DrawnRuns(runs, looks, _changes(runs))

    def mark_changes(self, axes: Axes, horizontal: RunAxis) -> None:
        """Draw a numbered vertical line where a resumed run changed settings; the legend has the text."""
        for number, change in enumerate(self.changes, 1):
            x = horizontal.place(self.lines[change.run], change.step)
            axes.axvline(x, color=self.looks[change.run].color, zorder=0.5, **CHANGE)
            axes.annotate(
                str(number), (x, 1), xycoords=("data", "axes fraction"), xytext=(2, -2), textcoords="offset points",
                va="top", fontsize=7, color=GRAY,
            )  # fmt: skip

    def add_legend(self, figure: Figure, kinds: Mapping[str, Style]) -> None:
        """Add the runs, the kinds of curves, and the changes of settings."""
        from matplotlib.lines import Line2D

        names = [drawable(name) for name in self.looks]
        handles = [Line2D([], [], **look.style) for look in self.looks.values()]
        for kind, style in kinds.items():
            names.append(kind)
            handles.append(Line2D([], [], color=GRAY, **style))
        for number, change in enumerate(self.changes, 1):
            names.append(drawable(f"{number}: step {change.step:,}, {change.text}"))
            handles.append(Line2D([], [], color=self.looks[change.run].color, **CHANGE))

        most = 2 if self.changes else 4  # columns
        figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), most))


def _changes(runs: Mapping[str, Lines]) -> list[Change]:
    """List the changes of settings of all runs, the last at each step."""
    changes: dict[tuple[str, int], Change] = {}
    for name, lines in runs.items():
        for line in lines:
            if not line.get("changed"):
                continue
            texts = []
            for setting, (_, new) in line["changed"].items():
                _, _, short = setting.rpartition(".")
                texts.append(f"{short} {setting_label(new)}")
            step = line["step"]
            changes[name, step] = Change(name, step, ", ".join(texts))
    return list(changes.values())


def setting_label(value: Any) -> str:
    """Return a short label for the value of a setting, such as the words of a mixture."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return shortened(text, SETTING_CHARACTERS)


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
    """Replace groups of neighboring points of a curve `[2, n]` with their medians; about `SMOOTHING` points remain."""
    size = max(curve.shape[1] // SMOOTHING, 1)  # points of a group
    whole = curve[:, : curve.shape[1] // size * size]
    medians: np.ndarray = np.median(whole.reshape(2, -1, size), axis=-1)
    return medians


def draw_baselines(axes: Axes, losses: Mapping[str, float], labels: bool = True) -> None:
    """Draw a horizontal line for each loss behind the curves, labeled on the right."""
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


def column(lines: Lines, field: str) -> np.ndarray:
    """Return the steps and values of the lines that have a field, `[2, n]`."""
    pairs = [(line["step"], line[field]) for line in lines if field in line]
    return np.array(pairs, float).reshape(-1, 2).T
