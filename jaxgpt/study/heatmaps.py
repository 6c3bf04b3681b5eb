"""Heatmaps of the inside of a model: attention, logit lens and patching, as matplotlib figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.errors import UserError
from jaxgpt.study.figure import GRAY, drawable, new_figure, styled, token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

TICK = 0.17  # minimum distance of tick labels in inches
LARGEST = (48.0, 18.0)  # maximum width and height of a matrix figure in inches


@styled()
def attention(pattern: ArrayLike, tokens: Sequence[str] | None = None, *, title: str = "") -> Figure:
    """Draw the attention of all heads of a layer in a grid, or of one head with the tokens as labels.

    Args:
        pattern: attention weights, `[N, T, S]` or `[T, S]`: a row for each query position, a column for each key position.
        tokens: the text of each key position, `[S]`, as labels of one head; the queries are the last T of them. None: the
            positions.
        title: figure title.
    """
    weights = np.asarray(pattern, np.float64)
    T, S = weights.shape[-2:]
    if weights.ndim == 2:
        keys = [str(i) for i in range(S)] if tokens is None else tokens
        return _cells(weights, _Labels(keys, keys[S - T :], x="key", y="query", bar="attention"), title)
    return _head_grid(weights, title)


def _head_grid(weights_NTS: np.ndarray, title: str) -> Figure:
    """Draw the attention of all heads in a grid."""
    N, T, S = weights_NTS.shape
    columns = math.ceil(math.sqrt(1.5 * N))
    rows = math.ceil(N / columns)
    figure = new_figure(1.7 * columns + 0.9, 1.85 * rows * max(T / S, 0.3) + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    images = []
    for head, axes in enumerate(grid[:N]):
        images.append(_image(axes, weights_NTS[head]))
        axes.set_title(f"head {head}", fontsize=8, color=GRAY, pad=3, loc="center")
        axes.set(xticks=[], yticks=[])
    for axes in grid[N:]:
        axes.set_axis_off()

    figure.supxlabel("key", fontsize="medium")
    figure.supylabel("query", fontsize="medium")
    figure.suptitle(drawable(title))
    _add_bar(images[0], list(grid), "attention")  # all heads have the same colors
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
    """Draw a matrix with a color for each value; `options`: further arguments of matplotlib's `imshow`."""
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
