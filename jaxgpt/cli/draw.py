"""Figures of runs: losses with baselines, or rewards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxgpt.cli.recorded_run import Lines
from jaxgpt.directories import LOSS_FIGURE

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.report.baselines import Baselines

# The horizontal axes of `jaxgpt.study.run_axis.Axis`. Importing that module would import JAX before wrong paths are reported.
Axis = Literal["all", "step", "tokens", "seconds"]


def distinct_baselines(recorded: Iterable[Baselines]) -> list[dict[str, float]]:
    """Return the different baselines of runs, each keyed by name; runs without baselines are ignored."""
    distinct: list[dict[str, float]] = []
    for each in recorded:
        losses = each["losses"]
        if losses and losses not in distinct:
            distinct.append(losses)
    return distinct


def draw(lines: Mapping[str, Lines], recorded: Iterable[Baselines], path: Path, x: Axis) -> None:
    """Draw the rewards of runs if all runs have rewards, otherwise the losses.

    Losses are drawn with the baselines in `recorded`, unless the baselines of two runs differ.
    """
    from jaxgpt.study.figure import save
    from jaxgpt.study.run_figures import has_rewards, losses, rewards

    if all(map(has_rewards, lines.values())):
        figure = rewards(lines, x)
    else:
        distinct = distinct_baselines(recorded)
        baselines = distinct[0] if len(distinct) == 1 else {}
        figure = losses(lines, x, baselines=baselines)
    save(figure, path)


def draw_run(run: Run, title: str) -> None:
    """Draw the rewards of a run, or its losses and the baselines of its data, as loss.png.

    Raises:
        UserError: if the run has no losses yet, or baselines.json is damaged.
    """
    # The first import of matplotlib on a machine scans all fonts and logs a message.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from jaxgpt.report.baselines import read_baselines
    from jaxgpt.trainer.metrics import read_metrics

    lines = {title: list(read_metrics(run.metrics))}
    draw(lines, [read_baselines(run.path)], run.path / LOSS_FIGURE, "step")
