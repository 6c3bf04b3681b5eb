"""Draw arrays as figures: attention, logit lens, patching, and the losses of runs.

Each function takes arrays and returns a matplotlib `Figure`, which needs no display: `figure.savefig("a.png")` or `"a.svg"`.
matplotlib is imported by the first call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import UserError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"  # comes with matplotlib
GRAY = "#6b7280"
LABEL = 0.045  # height of a label, relative to the axes
# Colors with even steps of lightness in OKLab (Ottosson 2020): white to dark blue, and blue to red through white.
SEQUENTIAL = "#ffffff #c5e7ff #8fcbfd #5caef8 #438fe1 #3771c1 #30569a #293d6f #1f2742".split()
DIVERGING = "#0654a3 #2f76bf #5d98d2 #8cbae3 #bfdbf2 #fafafa #efd0bc #dda789 #c97e5b #b35330 #9a2300".split()
RUNS = "#3069b3 #d07a2d #3c8c5f #9a4f9e #8a6d3b #c04a4a #4aa3a8 #6b7280".split()
SHOWN = 14  # characters of a token
PALE = 0.4  # opacity of training losses where there are validation losses
DARK = 0.55  # relative luminance below which text on a color is white
AXES = {"step": "step", "tokens": "tokens", "seconds": "time"}
SPACES = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}", " ": "\N{MIDDLE DOT}"}


def attention(pattern: ArrayLike, tokens: Sequence[str] | None = None, *, title: str = "") -> Figure:
    """Draw the attention of all heads of a layer in a grid, or of one head with the tokens as labels.

    Args:
        pattern: attention weights, `[N, T, S]` or `[T, S]`: a row for each query position, a column for each key position.
        tokens: the text of each key position, `[S]`; the queries are the last T of them. None: positions.
        title: of the figure.

    Raises:
        UserError: another number of dimensions, an empty array, or another number of tokens.
    """
    weights = _array("pattern", pattern, (2, 3))
    heads, T, S = (1, *weights.shape) if weights.ndim == 2 else weights.shape
    names = _names("tokens", tokens, S)
    if weights.ndim == 2:
        margin = 1.0 + 0.07 * max(map(len, names))
        figure = new_figure(min(max(3.0, 0.28 * S + margin + 0.3), 18.0), min(max(2.6, 0.28 * T + margin), 18.0))
        figure.set_layout_engine("compressed")
        axes = figure.subplots()
        image = _image(axes, weights, _colors(SEQUENTIAL), 0.0, 1.0)
        _labels(figure, axes, names, names[S - T :])
        axes.set(xlabel="key", ylabel="query")
        _title(axes, title)
        _bar(figure, image, [axes], "attention")
        return figure
    wanted = math.sqrt(1.5 * heads)
    whole = [n for n in range(1, heads + 1) if heads % n == 0 and wanted / 1.6 <= n <= wanted * 1.6]
    columns = min(whole or [math.ceil(wanted)], key=lambda n: abs(n - wanted))
    rows = math.ceil(heads / columns)
    figure = new_figure(1.7 * columns + 0.9, 1.85 * rows * max(T / S, 0.3) + 0.7)
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes in grid[heads:]:
        axes.set_axis_off()
    for head, axes in enumerate(grid[:heads]):
        image = _image(axes, weights[head], _colors(SEQUENTIAL), 0.0, 1.0)
        axes.set_title(f"head {head}", fontsize=8, color=GRAY, pad=3)
        axes.set(xticks=[], yticks=[])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    if title:
        figure.suptitle(drawable(title), parse_math=False, fontfamily=FONT, fontsize=11)
    _bar(figure, image, list(grid), "attention")
    return figure


def lens(
    values: ArrayLike,
    tokens: Sequence[str],
    words: Sequence[Sequence[str]] | None = None,
    *,
    layers: Sequence[str] | None = None,
    limits: tuple[float, float] | None = (0.0, 1.0),
    label: str = "probability",
    title: str = "",
) -> Figure:
    """Draw a logit lens: what each layer would predict after each token, the last layer at the top.

    Args:
        values: a number for each layer and position, such as the probability of the prediction, `[L, T]`.
        tokens: the tokens read, `[T]`.
        words: the token predicted by each layer at each position, `[L][T]`, to write into the cells.
        layers: names of the layers; None: their numbers.
        limits: values of the first and last color; None: the least and the greatest value.
        label: meaning of the values.
        title: of the figure.

    Raises:
        UserError: `values` is not a matrix, or the other arguments have other lengths.
    """
    numbers = _array("values", values, (2,))
    L, T = numbers.shape
    below, left = _names("tokens", tokens, T), _names("layers", layers, L)
    low, high = limits or (float(np.nanmin(numbers)), float(np.nanmax(numbers)))
    figure = new_figure(min(0.85 * T + 1.9, 64.0) if words else min(0.4 * T + 1.9, 24.0), min(0.3 * L + 1.5, 18.0))
    axes = figure.subplots()
    colors = _colors(SEQUENTIAL)
    image = _image(axes, numbers, colors, low, high, aspect="auto", origin="lower")
    _labels(figure, axes, below, left)
    if words is not None:
        if len(words) != L or any(len(row) != T for row in words):
            raise UserError(f"words must have {L} rows of {T} tokens, as values has")
        for layer, row in enumerate(words):
            for place, word in enumerate(row):
                share = (numbers[layer, place] - low) / max(high - low, 1e-9)
                red, green, blue, _ = colors(float(np.nan_to_num(share)))
                dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < DARK
                _text(axes, place, layer, shown(word), "white" if dark else "#111827")
    axes.set(xlabel="token", ylabel="layer")
    _title(axes, title)
    _bar(figure, image, [axes], label)
    return figure


def patching(
    effect: ArrayLike,
    tokens: Sequence[str],
    *,
    layers: Sequence[str] | None = None,
    label: str = "effect of the patch",
    title: str = "",
) -> Figure:
    """Draw effects around zero at each layer and position, as of activation patching: negative blue, positive red.

    Args:
        effect: a number for each layer and position, `[L, T]`.
        tokens: the tokens, `[T]`.
        layers: names of the layers; None: their numbers.
        label: meaning of the numbers.
        title: of the figure.

    Raises:
        UserError: `effect` is not a matrix, or the other arguments have other lengths.
    """
    numbers = _array("effect", effect, (2,))
    L, T = numbers.shape
    below, left = _names("tokens", tokens, T), _names("layers", layers, L)
    most = float(np.nanmax(np.abs(numbers), initial=0.0)) or 1.0
    figure = new_figure(min(0.42 * T + 2.0, 24.0), min(0.3 * L + 1.6, 18.0))
    axes = figure.subplots()
    image = _image(axes, numbers, _colors(DIVERGING), -most, most, aspect="auto", origin="lower")
    _labels(figure, axes, below, left)
    axes.set(xlabel="token", ylabel="layer")
    _title(axes, title)
    _bar(figure, image, [axes], label)
    return figure


def losses(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    x: Literal["all", "step", "tokens", "seconds"] = "all",
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Draw the training and validation losses of runs against steps, tokens and time.

    Args:
        runs: by name, the lines of metrics.jsonl (`jaxgpt.trainer.metrics.read_metrics`).
        x: the horizontal axis; all: three axes side by side.
        baselines: losses to draw as horizontal lines, by name.
        title: of the figure.

    Raises:
        UserError: a run has no losses, or another axis.
    """
    from matplotlib.lines import Line2D

    if x not in (choices := ("all", *AXES)):
        raise UserError(f"no axis {x!r}{did_you_mean(str(x), choices)}: choose from {', '.join(choices)}")
    kinds = list(AXES) if x == "all" else [x]
    figure = new_figure(4.0 * len(kinds) + (3.4 if len(kinds) == 1 else 1.0), 4.2)
    panels: list[Axes] = list(np.atleast_1d(figure.subplots(1, len(kinds), sharey=True)))
    curves = {name: _curves(name, lines) for name, lines in runs.items()}
    longest = max((float(each["seconds"].max(initial=0)) for pair in curves.values() for each in pair), default=0.0)
    divide, unit = next(
        ((n, u) for n, u in ((3600.0, "hours"), (60.0, "minutes")) if longest > 2 * n), (1.0, "seconds")
    )
    for axes, kind in zip(panels, kinds, strict=True):
        for number, (train, val) in enumerate(curves.values()):
            color, style = RUNS[number % len(RUNS)], ("-", "--", ":", "-.")[number // len(RUNS) % 4]
            scale = divide if kind == "seconds" else 1.0
            label = str(number) if axes is panels[0] else "_"  # a label with "_" is left out of the legend
            both = bool(len(val["loss"]))
            axes.plot(
                train[kind] / scale, train["loss"], style, color=color, linewidth=1, alpha=PALE if both else 1.0,
                label=None if both else label,
            )  # fmt: skip
            if both:
                axes.plot(
                    val[kind] / scale, val["loss"], style, color=color, linewidth=1.6, marker="o", markersize=3.5,
                    label=label,
                )  # fmt: skip
                best = val["loss"].argmin()
                if len(curves) == 1:
                    point = val[kind][best] / scale, val["loss"][best]
                    axes.annotate(f"{point[1]:.3f}", point, (0, 8), textcoords="offset points", ha="center")
        axes.set_xlabel(f"time ({unit})" if kind == "seconds" else AXES[kind])
        if kind == "tokens":
            from matplotlib.ticker import EngFormatter

            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        plain(axes)
        axes.margins(x=0.02)
    panels[0].set_ylabel("loss (nats per token)")
    for axes in panels:
        draw_baselines(axes, baselines or {}, labels=axes is panels[-1])
    if title:
        figure.suptitle(drawable(title), parse_math=False, fontfamily=FONT, fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    if any(len(train["loss"]) and len(val["loss"]) for train, val in curves.values()):
        handles += [
            Line2D([], [], color=GRAY, linewidth=1, alpha=PALE),
            Line2D([], [], color=GRAY, linewidth=1.6, marker="o", markersize=3.5),
        ]
        labels += ["training (single batch)", "validation"]
    legend = figure.legend(
        handles, labels, loc="outside upper left", ncols=min(len(labels), 4), frameon=False, fontsize=9
    )
    for text, name in zip(legend.get_texts(), runs, strict=False):
        text.set_text(drawable(name))
        text.set_parse_math(False)
        text.set_fontfamily(FONT)
    return figure


def drawable(text: str) -> str:
    """Escape unprintable characters, and replace characters that matplotlib's own font lacks with a box.

    Draw the result with `parse_math=False`, so that dollar signs are not formulas.
    """
    from matplotlib import get_data_path
    from matplotlib.font_manager import get_font

    font = get_font(str(Path(get_data_path(), "fonts", "ttf", f"{FONT.replace(' ', '')}.ttf")))
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return "".join(c if font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in escaped)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with its size in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> None:
    """Draw a light grid, without a frame at the top and right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_baselines(axes: Axes, losses: Mapping[str, float], labels: bool = True) -> None:
    """Draw a horizontal line for each loss behind the curves, labeled on the right."""
    for loss in losses.values():
        axes.axhline(loss, color="#9ca3af", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    low, high = axes.get_ylim()
    height = -math.inf
    for name, loss in sorted(losses.items(), key=lambda item: item[1]) if labels else ():
        height = max(loss, height + LABEL * (high - low))  # labels must not overlap
        axes.annotate(
            f"{name} {loss:.2f}", (1, height), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=GRAY, annotation_clip=False,
        )  # fmt: skip


def shown(token: str) -> str:
    """Return a token as a label: white space visible, other characters as `drawable`, at most `SHOWN` characters."""
    visible = drawable("".join(SPACES.get(c, c) for c in token))
    return visible if len(visible) <= SHOWN else visible[: SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _curves(name: str, lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return steps, tokens, seconds and losses of training and of validation.

    A line of an evaluation has no tokens and time: they are those of the steps before it.
    """
    number = lambda value: type(value) in (int, float) and math.isfinite(value)  # noqa: E731
    train = [line for line in lines if number(line.get("loss"))]
    val = [line for line in lines if number(line.get("val_loss"))]
    if not train and not val:
        raise UserError(f"{name} has no losses to draw: its metrics.jsonl has no complete line")
    known = [line for line in train if number(line.get("tokens")) and number(line.get("elapsed_seconds"))]
    done = np.array([line["step"] + 1 for line in known], float)
    at: dict[str, np.ndarray] = {}
    for kind, field in (("tokens", "tokens"), ("seconds", "elapsed_seconds")):
        at[kind] = np.array([line[field] for line in known], float)

    def curve(points: list[Mapping[str, Any]], field: str, offset: int) -> dict[str, np.ndarray]:
        steps = np.array([line["step"] for line in points], float)
        out = {"step": steps, "loss": np.array([line[field] for line in points], float)}
        for kind, values in at.items():
            out[kind] = np.interp(steps + offset, done, values) if len(done) else np.full(len(steps), np.nan)
        return out

    return curve(train, "loss", 1), curve(val, "val_loss", 0)


def _array(name: str, values: ArrayLike, dimensions: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim not in dimensions or not array.size:
        expected = " or ".join(map(str, dimensions))
        raise UserError(f"{name} must have {expected} dimensions and not be empty: its shape is {list(array.shape)}")
    return array


def _names(what: str, names: Sequence[str] | None, n: int) -> list[str]:
    """Return the labels of an axis.

    Raises:
        UserError: there are not `n`.
    """
    if names is None:
        return [str(i) for i in range(n)]
    if len(names) != n:
        raise UserError(f"{what} has {len(names)} items, and the array {n}: give one for each")
    return [shown(name) for name in names]


def _colors(names: list[str]) -> LinearSegmentedColormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("jaxgpt", names)


def _image(axes: Axes, values: np.ndarray, colors: Any, low: float, high: float, **options: Any) -> Any:
    image = axes.imshow(values, cmap=colors, vmin=low, vmax=high, interpolation="nearest", **options)
    for spine in axes.spines.values():
        spine.set(color="#d1d5db", linewidth=0.8)
    axes.tick_params(length=0)
    return image


def _labels(figure: Figure, axes: Axes, below: list[str], left: list[str]) -> None:
    """Label columns and rows; every second or third of them, where there are too many to read."""
    width, height = figure.get_size_inches()
    columns, rows = math.ceil(len(below) * 0.17 / width), math.ceil(len(left) * 0.17 / height)
    options: dict[str, Any] = {"fontsize": 8, "parse_math": False, "fontfamily": FONT}
    steep = any(len(name) > 3 for name in below)
    axes.set_xticks(range(0, len(below), columns))
    axes.set_xticklabels(
        below[::columns], rotation=60 if steep else 0, ha="right" if steep else "center",
        rotation_mode="anchor" if steep else "default", **options,
    )  # fmt: skip
    axes.set_yticks(range(0, len(left), rows))
    axes.set_yticklabels(left[::rows], **options)


def _text(axes: Axes, x: int, y: int, text: str, color: str) -> None:
    size = 8 if len(text) <= 8 else 6
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=color, parse_math=False, fontfamily=FONT)


def _title(axes: Axes, title: str) -> None:
    axes.set_title(drawable(title), parse_math=False, fontfamily=FONT, fontsize=11, loc="left")


def _bar(figure: Figure, image: Any, axes: list[Axes], label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label(drawable(label), fontsize=9, parse_math=False)
