"""Figures of runs: losses with baselines, or rewards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxgpt.cli.recorded_run import Lines
from jaxgpt.directories import LOSS_FIGURE

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run

# The horizontal axes of `jaxgpt.study.run_axis.Axis`. Importing that module would import JAX before wrong paths are reported.
Axis = Literal["all", "step", "tokens", "seconds"]


def common_baselines(about: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the baselines that all runs have in common, keyed by name; None if the baselines of two runs differ.

    `about` holds the result of `read_baselines` for each run; runs without baselines are ignored. {}: no run has baselines.
    """
    recorded = [found["losses"] for found in about if found["losses"]]
    if not recorded:
        return {}
    first, *others = recorded
    return first if all(losses == first for losses in others) else None


def draw(lines: Mapping[str, Lines], baselines: Mapping[str, float] | None, path: Path, x: Axis) -> None:
    """Draw the rewards of runs if all runs have rewards, otherwise the losses and the baselines, if any."""
    from jaxgpt.study.figure import save
    from jaxgpt.study.run_figures import has_rewards, losses, rewards

    if all(map(has_rewards, lines.values())):
        figure = rewards(lines, x)
    else:
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
    draw(lines, read_baselines(run.path)["losses"], run.path / LOSS_FIGURE, "step")
