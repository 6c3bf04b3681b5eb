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

from jaxgpt.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FONT = "DejaVu Sans"  # comes with matplotlib
GRAY = "#6b7280"
LABEL = 0.045  # height of a label, relative to the axes
# Colors with even steps of lightness in OKLab (Ottosson 2020): white to dark blue, and blue to red through white.
SEQUENTIAL = "#ffffff #c5e7ff #8fcbfd #5caef8 #438fe1 #3771c1 #30569a #293d6f #1f2742".split()
DIVERGING = "#0654a3 #2f76bf #5d98d2 #8cbae3 #bfdbf2 #fafafa #efd0bc #dda789 #c97e5b #b35330 #9a2300".split()
RUNS = "#3069b3 #d07a2d #3c8c5f #9a4f9e #8a6d3b #c04a4a #4aa3a8 #6b7280".split()
STYLES = ("-", "--", ":", "-.")
TEXT: dict[str, Any] = {"parse_math": False, "fontfamily": FONT}  # no text of a user is a formula
TOKEN_CHARACTERS = 14
TRAINING: dict[str, Any] = {"linewidth": 1, "alpha": 0.4}  # training losses next to validation losses
VALIDATION: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
DARK = 0.55  # relative luminance below which text on a color is white
AXES = ("step", "tokens", "seconds")
SPACES = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}", " ": "\N{MIDDLE DOT}"}


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
        names = _names(tokens, S)
        margin = 1.0 + 0.07 * max(map(len, names))
        figure = new_figure(min(max(3.0, 0.28 * S + margin + 0.3), 18.0), min(max(2.6, 0.28 * T + margin), 18.0))
        figure.set_layout_engine("compressed")
        axes = figure.subplots()
        image = _image(axes, weights, SEQUENTIAL, 0.0, 1.0)
        _label(axes, names, names[S - T :], "key", "query", title)
        return _with_bar(image, [axes], "attention")
    columns = math.ceil(math.sqrt(1.5 * len(weights)))
    rows = math.ceil(len(weights) / columns)
    figure = new_figure(1.7 * columns + 0.9, 1.85 * rows * max(T / S, 0.3) + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(weights) :]:
        axes.set_axis_off()
    for head, axes in enumerate(grid[: len(weights)]):
        image = _image(axes, weights[head], SEQUENTIAL, 0.0, 1.0)
        axes.set_title(f"head {head}", fontsize=8, color=GRAY, pad=3)
        axes.set(xticks=[], yticks=[])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.suptitle(drawable(title), fontsize=11, **TEXT)
    return _with_bar(image, list(grid), "attention")


def lens(
    probabilities: ArrayLike, tokens: Sequence[str], words: Sequence[Sequence[str]] | None = None, *, title: str = ""
) -> Figure:
    """Draw a logit lens: the prediction of each layer after each token, the first layer at the top.

    Args:
        probabilities: probability of the prediction, `[L, T]`.
        tokens: the tokens read, `[T]`.
        words: the token predicted by each layer at each position, `[L][T]`, to write into the cells.
        title: figure title.
    """
    numbers = np.asarray(probabilities, np.float64)
    image = _by_layer(numbers, tokens, SEQUENTIAL, (0.0, 1.0), title, 0.85 if words else 0.4)
    luminance = image.to_rgba(numbers)[..., :3] @ [0.2126, 0.7152, 0.0722]
    for layer, row in enumerate(words or ()):
        for position, text in enumerate(map(token_label, row)):
            color = "white" if luminance[layer, position] < DARK else "#111827"
            size = 8 if len(text) <= 8 else 6
            image.axes.text(position, layer, text, ha="center", va="center", fontsize=size, color=color, **TEXT)
    return _with_bar(image, [image.axes], "probability")


def patching(
    effect: ArrayLike, tokens: Sequence[str], *, label: str = "effect of the patch", title: str = ""
) -> Figure:
    """Draw effects around zero at each layer and position, such as of activation patching: negative blue, positive red.

    Args:
        effect: a number for each layer and position, `[L, T]`.
        tokens: the tokens, `[T]`.
        label: meaning of the numbers.
        title: figure title.
    """
    numbers = np.asarray(effect, np.float64)
    most = float(np.nanmax(np.abs(numbers), initial=0.0)) or 1.0
    image = _by_layer(numbers, tokens, DIVERGING, (-most, most), title, 0.4)
    return _with_bar(image, [image.axes], label)


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
        title: figure title.

    Raises:
        UserError: if a run has no losses, or there is no such axis.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    if x not in (choices := ("all", *AXES)):
        raise UserError(f"no axis {x!r}{did_you_mean(str(x), choices)}: choose from {', '.join(choices)}")
    kinds = list(AXES) if x == "all" else [x]
    figure = new_figure(4.0 * len(kinds) + (3.4 if len(kinds) == 1 else 1.0), 4.2)
    panels: list[Axes] = list(np.atleast_1d(figure.subplots(1, len(kinds), sharey=True)))
    curves = {name: _curves(name, lines) for name, lines in runs.items()}
    longest = max(each["seconds"].max(initial=0) for pair in curves.values() for each in pair)
    units = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
    divide, unit = next((n, unit) for n, unit in units if longest > 2 * n or n == 1)
    handles: list[Line2D] = []
    for axes, kind in zip(panels, kinds, strict=True):
        scale = divide if kind == "seconds" else 1
        for number, (name, (train, val)) in enumerate(curves.items()):
            line: dict[str, Any] = {"color": RUNS[number % len(RUNS)], "linestyle": STYLES[number // len(RUNS) % 4]}
            both = len(val["loss"]) > 0
            drawn = axes.plot(train[kind] / scale, train["loss"], **line, **(TRAINING if both else {"linewidth": 1}))
            if both:
                drawn = axes.plot(val[kind] / scale, val["loss"], **line, **VALIDATION)
            handles += drawn if axes is panels[0] else []
            at = train if len(train["loss"]) else val
            for step, what in _changes(runs[name]).items():
                where = np.interp(step, at["step"], at[kind]) / scale
                axes.axvline(where, color=line["color"], linewidth=0.8, linestyle=":", zorder=0.5)
                axes.annotate(
                    drawable(what), (where, 1), xycoords=("data", "axes fraction"), xytext=(2, -2),
                    textcoords="offset points", rotation=90, va="top", fontsize=7, color=GRAY, **TEXT,
                )  # fmt: skip
            if both and len(curves) == 1:
                best = val["loss"].argmin()
                point = val[kind][best] / scale, val["loss"][best]
                axes.annotate(f"{point[1]:.3f}", point, (0, 8), textcoords="offset points", ha="center")
        axes.set_xlabel(f"time ({unit})" if kind == "seconds" else kind)
        if kind == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        plain(axes)
        axes.margins(x=0.02)
        draw_baselines(axes, baselines or {}, labels=axes is panels[-1])
    panels[0].set_ylabel("loss (nats per token)")
    figure.suptitle(drawable(title), fontsize=11, **TEXT)
    names = [*runs]
    if any(len(train["loss"]) and len(val["loss"]) for train, val in curves.values()):
        handles += [Line2D([], [], color=GRAY, **kind) for kind in (TRAINING, VALIDATION)]
        names += ["training (single batch)", "validation"]
    numbers = list(map(str, range(len(handles))))  # replaced by the names: a legend omits labels that begin with "_"
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": min(len(names), 4)}
    legend = figure.legend(handles, numbers, **place, frameon=False, fontsize=9)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=drawable(name), **TEXT)
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


def token_label(token: str) -> str:
    """Return a short label for a token: white space visible, other characters as `drawable`."""
    visible = drawable("".join(SPACES.get(c, c) for c in token))
    short = visible[: TOKEN_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return visible if len(visible) <= TOKEN_CHARACTERS else short


def _curves(name: str, lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return steps, tokens, seconds and losses of training and of validation.

    Evaluations have the tokens and time of the last step before them.
    """

    def columns(*fields: str) -> list[np.ndarray]:
        """Return the columns of the lines that have all of these fields."""
        rows = [[line.get(field) for field in ("step", *fields)] for line in lines]
        known = [row for row in rows if all(type(value) in (int, float) for value in row)]
        numbers = np.array(known, float).reshape(-1, 1 + len(fields))
        return list(numbers[np.isfinite(numbers).all(1)].T)

    done, tokens, seconds = columns("tokens", "elapsed_seconds")

    def curve(field: str, offset: int) -> dict[str, np.ndarray]:
        step, loss = columns(field)

        def at(values: np.ndarray) -> np.ndarray:
            return np.interp(step + offset, done + 1, values) if len(done) else np.full(len(step), np.nan)

        return {"step": step, "loss": loss, "tokens": at(tokens), "seconds": at(seconds)}

    train, val = curve("loss", 1), curve("val_loss", 0)
    if not len(train["loss"]) + len(val["loss"]):
        raise UserError(f"{name} has no losses to draw: its metrics.jsonl has no complete line")
    return train, val


def _changes(lines: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the settings that changed when a run was resumed, by step: `{300: "learning_rate 0.001"}`."""
    changed = {line["step"]: line["changed"] for line in lines if isinstance(line.get("changed"), dict)}
    return {
        step: ", ".join(f"{name.rpartition('.')[2]} {new}" for name, (_, new) in settings.items())
        for step, settings in changed.items()
        if settings
    }


def _names(tokens: Sequence[str] | None, n: int) -> list[str]:
    """Return the labels of n positions: their tokens, or their numbers."""
    return [str(i) for i in range(n)] if tokens is None else [token_label(token) for token in tokens]


def _by_layer(
    numbers: np.ndarray,
    tokens: Sequence[str],
    colors: Sequence[str],
    limits: tuple[float, float],
    title: str,
    width: float,
) -> AxesImage:
    """Draw a row for each layer, the first at the top, and a column of a width in inches for each token."""
    L, T = numbers.shape
    names = _names(tokens, T)
    figure = new_figure(min(width * T + 1.9, 64.0 if width > 0.5 else 24.0), min(0.3 * L + 1.5, 18.0))
    image = _image(figure.subplots(), numbers, colors, *limits, aspect="auto")
    _label(image.axes, names, _names(None, L), "token", "layer", title)
    return image


def _image(axes: Axes, values: np.ndarray, colors: Sequence[str], low: float, high: float, **options: Any) -> AxesImage:
    from matplotlib.colors import LinearSegmentedColormap

    colormap = LinearSegmentedColormap.from_list("jaxgpt", colors)
    image = axes.imshow(values, cmap=colormap, vmin=low, vmax=high, interpolation="nearest", **options)
    for spine in axes.spines.values():
        spine.set(color="#d1d5db", linewidth=0.8)
    axes.tick_params(length=0)
    return image


def _label(axes: Axes, below: list[str], left: list[str], xlabel: str, ylabel: str, title: str) -> None:
    """Label columns and rows, or every n-th of them if there are too many to read."""
    width, height = axes.get_figure().get_size_inches()  # type: ignore[union-attr]
    columns, rows = math.ceil(len(below) * 0.17 / width), math.ceil(len(left) * 0.17 / height)
    steep: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    steep = steep if any(len(name) > 3 for name in below) else {}
    axes.set_xticks(range(0, len(below), columns), below[::columns], fontsize=8, **TEXT, **steep)
    axes.set_yticks(range(0, len(left), rows), left[::rows], fontsize=8, **TEXT)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(drawable(title), fontsize=11, loc="left", **TEXT)


def _with_bar(image: AxesImage, axes: list[Axes], label: str) -> Figure:
    """Add a color bar and return the figure."""
    figure: Any = axes[0].get_figure()
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label(drawable(label), fontsize=9, parse_math=False)
    return figure
