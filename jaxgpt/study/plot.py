"""Draw arrays as figures: attention, logit lens, patching, and the losses or rewards of runs.

`attention`, `lens`, `patching`, `losses` and `rewards` return a matplotlib `Figure`, which needs no display:
`figure.savefig("a.png")` or `"a.svg"`. The first call imports matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.study.curves import (
    AXES,
    FULL,
    HELD_OUT,
    SAMPLED,
    TRAINING,
    VALIDATION,
    Curves,
    DrawnRuns,
    Lines,
    RunAxis,
    Style,
    draw_baselines,
    draw_held_out,
    draw_layers,
    draw_losses,
    draw_rollouts,
)
from jaxgpt.study.figure import GRAY, drawable, new_figure, styled, token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

TICK = 0.17  # minimum distance of tick labels in inches
LARGEST = (48.0, 18.0)  # maximum width and height of a matrix figure in inches
# Metrics of experts, and labels of their panels. A metric is a number, or a list with a value for each layer.
EXPERT_METRICS = {
    "load_entropy": "entropy of the load (1: equal)",
    "largest_share": "largest share of an expert",
    "balance_loss": "balance loss (1: equal)",
    "router_z_loss": "z-loss of the router",
}


class RewardPanel(NamedTuple):
    """The metrics of sampled answers and of answers to held-out prompts ("": none) in a panel, and its label."""

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
def attention(pattern: ArrayLike, tokens: Sequence[str] | None = None, *, title: str = "") -> Figure:
    """Draw the attention of all heads of a layer in a grid, or of one head with the tokens as labels.

    Args:
        pattern: attention weights, `[N, T, S]` or `[T, S]`: a row for each query position, a column for each key position.
        tokens: the text of each key position, `[S]`; the queries are the last T of them. None: positions.
        title: figure title.
    """
    weights = np.asarray(pattern, np.float64)
    T, S = weights.shape[-2:]
    if weights.ndim == 2:
        keys = [str(i) for i in range(S)] if tokens is None else tokens
        return _cells(weights, _Labels(keys, keys[S - T :], x="key", y="query", bar="attention"), title)

    columns = math.ceil(math.sqrt(1.5 * len(weights)))
    rows = math.ceil(len(weights) / columns)
    figure = new_figure(1.7 * columns + 0.9, 1.85 * rows * max(T / S, 0.3) + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for head, axes in enumerate(grid[: len(weights)]):
        image = _image(axes, weights[head])
        axes.set_title(f"head {head}", fontsize=8, color=GRAY, pad=3, loc="center")
        axes.set(xticks=[], yticks=[])
    for axes in grid[len(weights) :]:
        axes.set_axis_off()

    figure.supxlabel("key", fontsize="medium")
    figure.supylabel("query", fontsize="medium")
    figure.suptitle(drawable(title))
    _add_bar(image, list(grid), "attention")
    return figure


@styled()
def lens(
    probabilities: ArrayLike, tokens: Sequence[str], words: Sequence[Sequence[str]] | None = None, *, title: str = ""
) -> Figure:
    """Draw a logit lens: the prediction of each layer after each token, the first layer at the top.

    Args:
        probabilities: probability of the prediction, `[L + 1, T]`.
        tokens: the text of each token, `[T]`.
        words: the token predicted by each layer at each position, `[L + 1][T]`, to write into the cells.
        title: figure title.
    """
    numbers = np.asarray(probabilities, np.float64)
    width = 0.85 if words else 0.4
    figure = _cells(numbers, _Labels(tokens, None, x="token", y="layer", bar="probability"), title, width)
    [axes, *_] = figure.axes
    for layer, row in enumerate(words or ()):
        for position, word in enumerate(row):
            color = "white" if numbers[layer, position] > 0.6 else "#111827"
            axes.text(position, layer, token_label(word), ha="center", va="center", fontsize=7, color=color)
    return figure


@styled()
def patching(
    effect: ArrayLike, tokens: Sequence[str], *, label: str = "effect of the patch", title: str = ""
) -> Figure:
    """Draw the effect of patching at each layer and position: negative in blue, positive in red.

    Args:
        effect: effect of patching each layer and position, `[L, T]`.
        tokens: the text of each token, `[T]`.
        label: label of the color bar.
        title: figure title.
    """
    numbers = np.asarray(effect, np.float64)
    most = float(np.nanmax(np.abs(numbers), initial=0.0)) or 1.0
    labels = _Labels(tokens, None, x="token", y="layer", bar=label)
    return _cells(numbers, labels, title, width=0.4, limits=(-most, most))


@styled()
def losses(
    runs: Mapping[str, Lines],
    x: Literal["all", "step", "tokens", "seconds"] = "all",
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
    x: Literal["all", "step", "tokens", "seconds"] = "all",
    *,
    title: str = "",
) -> Figure:
    """Draw the metrics of runs with rewards: reward, tokens per answer, entropy and KL, each in a panel.

    Each of about 50 points of a curve is the median of the same number of lines, because estimates of KL have outliers.
    The answers to held-out prompts are dots, with the standard error of their mean reward. A panel without values in
    any run is omitted.

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
    """Return whether a run has a metric."""
    return any(metric in line for lines in runs.values() for line in lines)


def _check_runs(runs: Mapping[str, Lines], x: str) -> None:
    """Raise `UserError` if there are no runs, or the axis does not exist."""
    choices = ("all", *AXES)
    if x not in choices:
        raise UserError(f"no axis {x!r}{did_you_mean(str(x), choices)}: choose from {', '.join(choices)}")
    if not runs:
        raise UserError("no runs to draw: pass the metrics of at least one run")


class _Labels(NamedTuple):
    """The labels of a heatmap.

    Attributes:
        columns: label of each column.
        rows: label of each row; None: its index.
        x, y: names of the horizontal and the vertical axis.
        bar: name of the values, at the color bar.
    """

    columns: Sequence[str]
    rows: Sequence[str] | None
    x: str
    y: str
    bar: str


def _cells(
    values: np.ndarray, labels: _Labels, title: str, width: float = 0.3, limits: tuple[float, float] = (0.0, 1.0)
) -> Figure:
    """Draw a matrix as a heatmap, the first row at the top, with cells `width` inches wide, in colors between `limits`."""
    columns = labels.columns
    rows = [str(i) for i in range(len(values))] if labels.rows is None else labels.rows
    if values.shape != (len(rows), len(columns)):
        raise UserError(
            f"expected an array of shape [{len(rows)}, {len(columns)}] for these labels, not {list(values.shape)}"
        )
    below = [token_label(label) for label in columns]
    left = [token_label(label) for label in rows]
    max_width, max_height = LARGEST
    figure_width = min(1.6 + 0.07 * max(map(len, left)) + width * len(below), max_width)
    figure_height = min(1.0 + 0.06 * max(map(len, below)) + 0.3 * len(left), max_height)
    figure = new_figure(figure_width, figure_height)
    axes = figure.subplots()
    image = _image(axes, values, limits, aspect="auto")

    # Label as many columns and rows as fit, at equal distances.
    column_step = math.ceil(len(below) * TICK / figure_width)
    row_step = math.ceil(len(left) * TICK / figure_height)
    steep: dict[str, Any] = {}
    if any(len(label) > 3 for label in below):
        steep = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(0, len(below), column_step), below[::column_step], fontsize=8, **steep)
    axes.set_yticks(range(0, len(left), row_step), left[::row_step], fontsize=8)
    axes.set(xlabel=labels.x, ylabel=labels.y, title=drawable(title))
    _add_bar(image, [axes], labels.bar)
    return figure


def _image(axes: Axes, values: np.ndarray, limits: tuple[float, float] = (0.0, 1.0), **options: Any) -> AxesImage:
    low, high = limits
    colors = "RdBu_r" if low < 0 else "Blues"
    image = axes.imshow(values, cmap=colors, vmin=low, vmax=high, interpolation="nearest", **options)
    axes.spines[:].set(color="#d1d5db", linewidth=0.8)
    axes.tick_params(length=0)
    return image


def _add_bar(image: AxesImage, axes: list[Axes], label: str) -> None:
    """Add a color bar next to the axes."""
    figure: Any = axes[0].get_figure()
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label(drawable(label))
