"""Figures of runs: their losses, or the metrics of runs with rewards, from the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, get_args

from jaxgpt.errors import UserError
from jaxgpt.study.curves import (
    FULL,
    HELD_OUT,
    SAMPLED,
    TRAINING,
    VALIDATION,
    Curves,
    draw_baselines,
    draw_held_out,
    draw_layers,
    draw_losses,
    draw_rollouts,
)
from jaxgpt.study.drawn_runs import DrawnRuns, Style
from jaxgpt.study.figure import drawable, new_figure, styled
from jaxgpt.study.run_axis import AXES, Axis, Lines, RunAxis
from jaxgpt.suggestions import did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metrics of experts, and labels of their panels. A metric is a number, or a list with a value for each layer.
EXPERT_METRICS = {
    "load_entropy": "entropy of the load (1: equal)",
    "largest_share": "largest share of an expert",
    "balance_loss": "balance loss (1: equal)",
    "router_z_loss": "z-loss of the router",
}


class RewardPanel(NamedTuple):
    """The metrics of sampled answers and of answers to held-out prompts ("": no such metric) in a panel, and its label."""

    sampled: str
    held_out: str
    label: str


REWARD_PANELS = (
    RewardPanel("reward", "val_reward", "reward"),
    RewardPanel("answer_tokens", "val_answer_tokens", "tokens per answer"),
    RewardPanel("entropy", "", "entropy (nats per token)"),
    RewardPanel("kl", "", "KL to the reference (nats per token)"),
)


@styled()
def losses(
    runs: Mapping[str, Lines],
    x: Axis = "all",
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Draw the training and validation losses of runs against steps, tokens and time; with experts, also their metrics.

    Comparable evaluations of a run are not connected with evaluations on fewer windows (`train.eval_windows`) or earlier data.
    The panels of experts show the mean over the layers as a line, and the range over the layers, against the first axis.

    Args:
        runs: dict of the lines of metrics.jsonl (`jaxgpt.trainer.metrics.read_metrics`), keyed by run name.
        x: the horizontal axis; all: three axes side by side.
        baselines: dict of losses to draw as horizontal lines, keyed by name.
        title: figure title.

    Raises:
        UserError: if there are no runs, a run has no losses, or the axis does not exist.
    """
    _check_runs(runs, x)
    curves = {name: Curves.of(lines) for name, lines in runs.items()}
    for name, curve in curves.items():
        if not (curve.has_training or curve.has_validation):
            raise UserError(f"{name} has no losses to draw: its metrics.jsonl has no line with a loss; omit this run")
    drawn = DrawnRuns.of(runs)
    horizontals = [RunAxis.of(kind, runs) for kind in (AXES if x == "all" else [x])]
    metrics = [name for name in EXPERT_METRICS if _have(runs, name)]
    figure, loss_panels, expert_panels = _loss_panels(len(horizontals), len(metrics))

    for axes, horizontal in zip(loss_panels, horizontals, strict=True):
        for name, curve in curves.items():
            draw_losses(axes, curve, runs[name], horizontal, drawn.looks[name], with_lowest=len(runs) == 1)
        drawn.mark_changes(axes, horizontal)
        horizontal.draw(axes)
        draw_baselines(axes, baselines or {}, labels=axes is loss_panels[-1])
    loss_panels[0].set(ylabel="loss (nats per token)", title=drawable(title))

    first = horizontals[0]
    for axes, metric in zip(expert_panels, metrics, strict=True):
        for name, lines in runs.items():
            draw_layers(axes, lines, metric, first, drawn.looks[name])
        first.draw(axes)
        axes.set_ylabel(EXPERT_METRICS[metric])
    drawn.add_legend(figure, _loss_kinds(curves.values()))
    return figure


def _loss_panels(n_losses: int, n_experts: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return a figure, panels of losses with the same vertical axis, and panels of experts."""
    rows = 2 if n_experts else 1
    columns = math.ceil((n_losses + n_experts) / rows)
    margin = 3.4 if columns == 1 else 1.0  # inches
    figure = new_figure(4.0 * columns + margin, 4.2 * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
    first, *others = grid[:n_losses]
    for axes in others:
        axes.sharey(first)
        axes.tick_params(labelleft=False)
    for axes in grid[n_losses + n_experts :]:
        axes.set_axis_off()
    return figure, grid[:n_losses], grid[n_losses : n_losses + n_experts]


def _loss_kinds(curves: Iterable[Curves]) -> dict[str, Style]:
    """Return the styles of the kinds of losses that occur together, keyed by their description."""
    kinds: dict[str, Style] = {}
    several = list(curves)
    if any(curve.has_training and curve.has_validation for curve in several):
        kinds["training (single batch)"] = TRAINING
        kinds["validation"] = VALIDATION
    if any(curve.partial.size and curve.full.size for curve in several):
        kinds["validation, comparable"] = FULL
    return kinds


@styled()
def rewards(
    runs: Mapping[str, Lines],
    x: Axis = "all",
    *,
    title: str = "",
) -> Figure:
    """Draw the metrics of runs with rewards: reward, tokens per answer, entropy and KL, each in a panel.

    From 100 lines on, curves of sampled answers are smoothed, because estimates of KL have outliers: each of 50 to 75 points is
    the median of the same number of lines. The answers to held-out prompts are dots, with the standard error of their mean
    reward. A panel without values of sampled answers in any run is omitted.

    Args:
        runs: dict of the lines of metrics.jsonl, as for `losses`.
        x: the horizontal axis; all: steps.
        title: figure title.

    Raises:
        UserError: if there are no runs, a run has no rewards, or the axis does not exist.
    """
    _check_runs(runs, x)
    for name, lines in runs.items():
        if not has_rewards(lines):
            raise UserError(
                f"{name} has no rewards to draw: its metrics.jsonl has no line with a reward; omit this run"
            )
    drawn = DrawnRuns.of(runs)
    horizontal = RunAxis.of("step" if x == "all" else x, runs)
    shown = [panel for panel in REWARD_PANELS if _have(runs, panel.sampled)]
    figure = new_figure(3.6 * len(shown) + 0.8, 3.8)
    [grid] = figure.subplots(1, len(shown), squeeze=False)

    for axes, panel in zip(grid, shown, strict=True):
        for name, lines in runs.items():
            draw_rollouts(axes, lines, panel.sampled, horizontal, drawn.looks[name])
            if panel.held_out:
                draw_held_out(axes, lines, panel.held_out, horizontal, drawn.looks[name])
        drawn.mark_changes(axes, horizontal)
        horizontal.draw(axes)
        axes.set(ylabel=panel.label)
        axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    grid[0].set(title=drawable(title))
    drawn.add_legend(figure, {"sampled answers": SAMPLED, "most probable answers to held-out prompts": HELD_OUT})
    return figure


def has_rewards(lines: Lines) -> bool:
    """Return whether lines of metrics.jsonl have rewards."""
    return any("reward" in line for line in lines)


def _have(runs: Mapping[str, Lines], metric: str) -> bool:
    """Return whether any of the runs has a metric."""
    return any(metric in line for lines in runs.values() for line in lines)


def _check_runs(runs: Mapping[str, Lines], x: str) -> None:
    """Raise `UserError` if there are no runs, or the axis does not exist."""
    choices = get_args(Axis)
    if x not in choices:
        raise UserError(f"no axis {x!r}{did_you_mean(str(x), choices)}: choose from {', '.join(choices)}")
    if not runs:
        raise UserError("no runs to draw: pass the metrics of at least one run")
