"""Draw the factors of the tables of docs/performance.md: `python docs/tools/speed_chart.py`.

A table belongs to the chart if its columns are CPUs. A cell such as `**1.11** (34.6, 38.4)` is a factor with its two
measurements; `0.90 to 0.99 (27.4, 27.0)` is the range of several runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1]
COLORS = {"Zen 3": "tab:orange", "Zen 4": "tab:red", "Cascade Lake": "tab:blue", "Emerald Rapids": "tab:cyan"}


class Speed(NamedTuple):
    """The factors of one row of a table on one CPU, from lowest to highest."""

    row: str
    cpu: str
    factors: tuple[float, ...]


def speeds(page: str) -> list[Speed]:
    """Read the factors of a page, in order.

    >>> speeds("| step | Zen 4 |\\n|---|---|\\n| small | **1.02 to 1.16** (206, 239) |\\n")
    [Speed(row='step: small', cpu='Zen 4', factors=(1.02, 1.16))]
    """
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        cpus = [next((cpu for cpu in COLORS if name.startswith(cpu)), "") for name in head[1:]]
        if not all(cpus):
            continue
        for name, *cells in rows:
            for cpu, cell in zip(cpus, cells, strict=True):
                factors = re.findall(r"\d+\.\d+", cell.partition("(")[0])
                if factors:
                    found.append(Speed(f"{head[0]}: {name}", cpu, tuple(map(float, factors))))
    return found


def main() -> None:
    """Write docs/img/speed.png."""
    found = speeds((DOCS / "performance.md").read_text("utf-8"))
    rows = list(dict.fromkeys(each.row for each in found))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1), constrained_layout=True)
    for cpu, color in COLORS.items():
        of_cpu = [each for each in found if each.cpu == cpu]
        middles = [sum(each.factors) / len(each.factors) for each in of_cpu]
        places = [rows.index(each.row) for each in of_cpu]
        axes.hlines(places, [min(each.factors) for each in of_cpu], [max(each.factors) for each in of_cpu], color=color)
        axes.plot(middles, places, "o", color=color, label=cpu)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.8, 1, 1.5, 2, 3, 4], ["0.8", "1", "1.5", "2", "3", "4"])
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("speed relative to the other program")
    figure.legend(loc="outside upper right", ncols=len(COLORS))
    figure.savefig(DOCS / "img" / "speed.png", dpi=110)


if __name__ == "__main__":
    main()
