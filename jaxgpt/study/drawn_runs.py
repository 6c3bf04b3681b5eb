"""Runs that share a figure: their colors, their changes of settings, and the legend."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.study.figure import GRAY, drawable, shortened
from jaxgpt.study.run_axis import Lines, RunAxis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = Mapping[str, Any]  # keyword arguments of matplotlib for a line

COLORS = "#3069b3 #d07a2d #3c8c5f #9a4f9e #8a6d3b #c04a4a #4aa3a8 #6b7280".split()  # colors of runs
SETTING_CHARACTERS = 40  # maximum length of the label of a setting
CHANGE: Style = {"linewidth": 0.8, "linestyle": ":"}  # style of changes of settings in a resumed run


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
        """Add a legend of the runs, the kinds of curves, and the changes of settings."""
        from matplotlib.lines import Line2D

        names = [drawable(name) for name in self.looks]
        handles = [Line2D([], [], **look.style) for look in self.looks.values()]
        for kind, style in kinds.items():
            names.append(kind)
            handles.append(Line2D([], [], color=GRAY, **style))
        for number, change in enumerate(self.changes, 1):
            names.append(drawable(f"{number}: step {change.step:,}, {change.text}"))
            handles.append(Line2D([], [], color=self.looks[change.run].color, **CHANGE))

        most = 2 if self.changes else 4  # maximum number of columns
        figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), most))


def _changes(runs: Mapping[str, Lines]) -> list[Change]:
    """List the changes of settings of all runs; if a run has several at a step, only the last."""
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
