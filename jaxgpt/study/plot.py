"""Draw arrays as figures: attention, logit lens, patching, and the losses or rewards of runs.

`attention`, `lens`, `patching`, `losses` and `rewards` return a matplotlib `Figure`, which needs no display:
`figure.savefig("a.png")` or `"a.svg"`. The first call imports matplotlib.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.files import write_atomically
from jaxgpt.study.inspection import DOT, visible
from jaxgpt.trainer.metrics import comparable_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FONT = "DejaVu Sans"  # font of all figures, bundled with matplotlib
# Never parse text as a formula, even if a token or run name contains dollar signs.
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.family": FONT,
    "font.size": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
GRAY = "#6b7280"
LABEL = 0.045  # height of a baseline label, as a fraction of the axes' height
TICK = 0.17  # minimum distance of tick labels in inches
LARGEST = (48.0, 18.0)  # maximum width and height of a matrix figure in inches
RUNS = "#3069b3 #d07a2d #3c8c5f #9a4f9e #8a6d3b #c04a4a #4aa3a8 #6b7280".split()
TOKEN_CHARACTERS = 14
SETTING_CHARACTERS = 40
TRAINING: dict[str, Any] = {"linewidth": 1, "alpha": 0.4}  # style of training losses next to validation losses
VALIDATION: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
# Style of evaluations on the most windows, next to evaluations on fewer windows.
FULL: dict[str, Any] = {"linestyle": "none", "marker": "D", "markersize": 5}
SAMPLED: dict[str, Any] = {"linewidth": 1.4}  # style of sampled answers
HELD_OUT: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 3.5,
}  # style of answers to held-out prompts
CHANGE: dict[str, Any] = {"linewidth": 0.8, "linestyle": ":"}  # style of changes of settings in a resumed run
# AXES maps axis names to fields of metrics.jsonl.
AXES = {"step": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
# Metrics of experts, and labels of their panels. A list has a value of each layer.
OF_EXPERTS = {
    "load_entropy": "entropy of the load (1: equal)",
    "largest_share": "largest share of an expert",
    "balance_loss": "balance loss (1: equal)",
    "router_z_loss": "z-loss of the router",
}
# REWARDS maps metrics of rollouts and of the held-out prompts to the labels of their panels.
REWARDS = {
    "reward": ("val_reward", "reward"),
    "answer_tokens": ("val_answer_tokens", "tokens per answer"),
    "entropy": ("", "entropy (nats per token)"),
    "kl": ("", "KL to the reference (nats per token)"),
}
SMOOTHING = 50  # approximate number of points of a curve of rollouts


@contextmanager
def _style() -> Iterator[None]:
    """Draw with `STYLE`, regardless of the user's matplotlib settings."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


@_style()
def attention(pattern: ArrayLike, tokens: Sequence[str] | None = None, *, title: str = "") -> Figure:
    """Draw the attention of all heads of a layer in a grid, or of one head with the tokens as labels.

    Args:
        pattern: attention weights, `[N, T, S]` or `[T, S]`: a row for each query position, a column for each key position.
        tokens: the text of each key position, `[S]`; the queries are the last T of them. None: positions.
    """
    weights = np.asarray(pattern, np.float64)
    T, S = weights.shape[-2:]
    if weights.ndim == 2:
        keys = [str(i) for i in range(S)] if tokens is None else tokens
        return _cells(weights, keys, keys[S - T :], ("key", "query", "attention"), title)

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


@_style()
def lens(
    probabilities: ArrayLike, tokens: Sequence[str], words: Sequence[Sequence[str]] | None = None, *, title: str = ""
) -> Figure:
    """Draw a logit lens: the prediction of each layer after each token, the first layer at the top.

    Args:
        probabilities: probability of the prediction, `[L + 1, T]`.
        tokens: the text of each token, `[T]`.
        words: the token predicted by each layer at each position, `[L + 1][T]`, to write into the cells.
    """
    numbers = np.asarray(probabilities, np.float64)
    width = 0.85 if words else 0.4
    figure = _cells(numbers, tokens, None, ("token", "layer", "probability"), title, width)
    [axes, *_] = figure.axes
    for layer, row in enumerate(words or ()):
        for position, word in enumerate(row):
            color = "white" if numbers[layer, position] > 0.6 else "#111827"
            axes.text(position, layer, token_label(word), ha="center", va="center", fontsize=7, color=color)
    return figure


@_style()
def patching(
    effect: ArrayLike, tokens: Sequence[str], *, label: str = "effect of the patch", title: str = ""
) -> Figure:
    """Draw the effect of patching at each layer and position: negative in blue, positive in red.

    Args:
        effect: effect of patching each layer and position, `[L, T]`.
        tokens: the text of each token, `[T]`.
        label: label of the color bar.
    """
    numbers = np.asarray(effect, np.float64)
    most = float(np.nanmax(np.abs(numbers), initial=0.0)) or 1.0
    return _cells(numbers, tokens, None, ("token", "layer", label), title, width=0.4, limits=(-most, most))


@_style()
def losses(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    x: Literal["all", "step", "tokens", "seconds"] = "all",
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Draw the training and validation losses of runs against steps, tokens and time; for experts, also their loads.

    Comparable evaluations of a run are not connected with those on fewer windows (`train.eval_windows`) or earlier data. The
    panels of experts have a line for the mean over the layers, and the range of the layers; they use the first axis.

    Args:
        runs: dict of the lines of metrics.jsonl (`jaxgpt.trainer.metrics.read_metrics`), keyed by run name.
        x: the horizontal axis; all: three axes side by side.
        baselines: dict of losses to draw as horizontal lines, keyed by name.

    Raises:
        UserError: if there are no runs, a run has no losses, or the axis does not exist.
    """
    _check_runs(runs, x)
    curves = {name: Curves.of(lines) for name, lines in runs.items()}
    for name, curve in curves.items():
        if not curve.training.size + curve.partial.size + curve.full.size:
            raise UserError(f"{name} has no losses to draw: its metrics.jsonl has no line with a loss")

    looks = _looks(runs)
    changes = _changes(runs)

    # One panel for each kind of axis, and for each metric of experts.
    kinds = list(AXES) if x == "all" else [x]
    extra = [name for name in OF_EXPERTS if any(name in line for lines in runs.values() for line in lines)]
    rows = 2 if extra else 1
    columns = math.ceil((len(kinds) + len(extra)) / rows)
    margin = 3.4 if columns == 1 else 1.0  # inches
    figure = new_figure(4.0 * columns + margin, 4.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    panels = grid[: len(kinds)]
    for axes in panels[1:]:
        axes.sharey(panels[0])
        axes.tick_params(labelleft=False)
    seconds, unit = _time_unit(runs)
    for axes, kind in zip(panels, kinds, strict=True):
        scale = seconds if kind == "seconds" else 1
        for name, curve in curves.items():
            place = partial(_place, runs[name], kind, scale)
            _draw_run(axes, curve, place, looks[name], labeled=len(curves) == 1)
        for number, change in enumerate(changes, 1):
            x_change = _place(runs[change.run], kind, scale, change.step)
            _mark_change(axes, number, x_change, looks[change.run]["c"])
        _style_axes(axes, kind, unit)
        draw_baselines(axes, baselines or {}, labels=axes is panels[-1])
    panels[0].set(ylabel="loss (nats per token)", title=drawable(title))
    for axes, metric in zip(grid[len(kinds) :], extra, strict=False):
        for name, lines in runs.items():
            place = partial(_place, lines, kinds[0], seconds if kinds[0] == "seconds" else 1)
            _draw_layers(axes, lines, metric, place, looks[name])
        _style_axes(axes, kinds[0], unit)
        axes.set_ylabel(OF_EXPERTS[metric])
    for axes in grid[len(kinds) + len(extra) :]:
        axes.set_axis_off()
    _add_legend(figure, looks, _loss_kinds(list(curves.values())), changes)
    return figure


@_style()
def rewards(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    x: Literal["all", "step", "tokens", "seconds"] = "all",
    *,
    title: str = "",
) -> Figure:
    """Draw the metrics of runs with rewards: reward, tokens per answer, entropy and KL, each in a panel.

    Each of about 50 points of a curve is the median of equally many lines, because estimates of KL have outliers. The answers
    to held-out prompts are dots, with the standard error of their mean reward. A panel without values in any run is omitted.

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
            raise UserError(f"{name} has no rewards to draw: its metrics.jsonl has no line with a reward")
    looks = _looks(runs)
    changes = _changes(runs)
    kind = "step" if x == "all" else x
    seconds, unit = _time_unit(runs)
    scale = seconds if kind == "seconds" else 1

    shown = [name for name in REWARDS if any(name in line for lines in runs.values() for line in lines)]
    figure = new_figure(3.6 * len(shown) + 0.8, 3.8)
    [panels] = figure.subplots(1, len(shown), squeeze=False)
    for axes, name in zip(panels, shown, strict=True):
        held_out, label = REWARDS[name]
        for run, lines in runs.items():
            place = partial(_place, lines, kind, scale)
            steps, values = _smoothed(_column(lines, name))
            axes.plot(place(steps), values, **looks[run], **SAMPLED)
            steps, values = _column(lines, held_out)
            _, errors = _column([line for line in lines if held_out in line], f"{held_out}_stderr")
            spread = errors if len(errors) == len(values) else None
            axes.errorbar(place(steps), values, spread, color=looks[run]["c"], elinewidth=0.7, **HELD_OUT)
        for number, change in enumerate(changes, 1):
            x_change = _place(runs[change.run], kind, scale, change.step)
            _mark_change(axes, number, x_change, looks[change.run]["c"])
        _style_axes(axes, kind, unit)
        axes.set(ylabel=label)
        axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    panels[0].set(title=drawable(title))
    kinds = {"sampled answers": SAMPLED, "most probable answers to held-out prompts": HELD_OUT}
    _add_legend(figure, looks, kinds, changes)
    return figure


def has_rewards(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether lines of metrics.jsonl have rewards."""
    return any("reward" in line for line in lines)


def _smoothed(curve: np.ndarray) -> np.ndarray:
    """Return the median of equally many neighboring points of a curve `[2, n]`, so that about `SMOOTHING` points remain."""
    each = max(curve.shape[1] // SMOOTHING, 1)
    whole = curve[:, : curve.shape[1] // each * each]
    medians: np.ndarray = np.median(whole.reshape(2, -1, each), axis=-1)
    return medians


def _check_runs(runs: Mapping[str, Any], x: str) -> None:
    """Raise `UserError` if there are no runs, or the axis does not exist."""
    choices = ("all", *AXES)
    if x not in choices:
        raise UserError(f"no axis {x!r}{did_you_mean(str(x), choices)}: choose from {', '.join(choices)}")
    if not runs:
        raise UserError("no runs to draw: pass the metrics of at least one run")


def _looks(runs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a color for every run; after eight runs, the colors repeat with a different dash."""
    looks: dict[str, dict[str, Any]] = {}
    styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), RUNS))
    for name, (dash, color) in zip(runs, styles, strict=False):
        looks[name] = {"ls": dash, "c": color}
    return looks


def _loss_kinds(curves: Sequence[Curves]) -> dict[str, dict[str, Any]]:
    """Return the styles of the kinds of losses that occur together, keyed by their description."""
    kinds: dict[str, dict[str, Any]] = {}
    if any(curve.training.size and curve.partial.size + curve.full.size for curve in curves):
        kinds["training (single batch)"] = TRAINING
        kinds["validation"] = VALIDATION
    if any(curve.partial.size and curve.full.size for curve in curves):
        kinds["validation, comparable"] = FULL
    return kinds


def _add_legend(
    figure: Figure,
    looks: Mapping[str, dict[str, Any]],
    kinds: Mapping[str, dict[str, Any]],
    changes: Sequence[Change],
) -> None:
    """Add the runs, the kinds of curves, and the changes of settings."""
    from matplotlib.lines import Line2D

    names = [drawable(name) for name in looks]
    handles = [Line2D([], [], **look) for look in looks.values()]
    for kind, style in kinds.items():
        names.append(kind)
        handles.append(Line2D([], [], color=GRAY, **style))
    for number, change in enumerate(changes, 1):
        names.append(drawable(f"{number}: step {change.step:,}, {change.text}"))
        handles.append(Line2D([], [], color=looks[change.run]["c"], **CHANGE))

    most = 2 if changes else 4  # columns
    figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), most))


class Curves(NamedTuple):
    """The losses of a run, each steps and values `[2, n]`.

    Attributes:
        training: training losses.
        partial: validation losses on fewer windows than `full`, or on earlier validation data.
        full: validation losses that are comparable with each other (`comparable_evaluations`).
    """

    training: np.ndarray
    partial: np.ndarray
    full: np.ndarray

    @staticmethod
    def of(lines: Sequence[Mapping[str, Any]]) -> Curves:
        """Read the losses from the lines of metrics.jsonl."""
        full = comparable_evaluations(lines)
        steps = {line["step"] for line in full}
        partial = [line for line in lines if line["step"] not in steps]
        return Curves(_column(lines, "loss"), _column(partial, "val_loss"), _column(full, "val_loss"))


class Change(NamedTuple):
    """The settings that a resumed run changed at a step."""

    run: str
    step: int
    text: str


def _draw_run(axes: Axes, curve: Curves, place: Callable[[Any], Any], look: Mapping[str, Any], labeled: bool) -> None:
    """Draw the losses of a run; with `labeled`, write the lowest comparable validation loss next to its point."""
    has_validation = curve.partial.size + curve.full.size > 0
    steps, training = curve.training
    axes.plot(place(steps), training, **look, **(TRAINING if has_validation else {"linewidth": 1}))
    steps, full = curve.full
    if curve.partial.size:
        partial_steps, values = curve.partial
        axes.plot(place(partial_steps), values, **look, **VALIDATION)
        axes.plot(place(steps), full, color=look["c"], **FULL)
    else:
        axes.plot(place(steps), full, **look, **VALIDATION)

    if curve.full.size and labeled:
        lowest = full.argmin()
        point = (place(steps[lowest]), full[lowest])
        axes.annotate(f"{full[lowest]:.3f}", point, (0, 8), textcoords="offset points", ha="center")


def _draw_layers(
    axes: Axes, lines: Sequence[Mapping[str, Any]], metric: str, place: Callable[[Any], Any], look: Mapping[str, Any]
) -> None:
    """Draw the mean of a metric over the layers, and the range of the layers if it has a value of each."""
    found = [line for line in lines if metric in line]
    if not found:
        return
    x = place(np.array([line["step"] for line in found], float))
    value_nL = np.array([np.ravel(line[metric]) for line in found], float)
    axes.plot(x, value_nL.mean(1), **look, linewidth=1)
    if value_nL.shape[1] > 1:
        axes.fill_between(x, value_nL.min(1), value_nL.max(1), color=look["c"], alpha=0.15, linewidth=0)


def _changes(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Change]:
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


def _mark_change(axes: Axes, number: int, x: float, color: str) -> None:
    """Draw a numbered vertical line where a resumed run changed settings; the legend has the text."""
    axes.axvline(x, color=color, zorder=0.5, **CHANGE)
    axes.annotate(
        str(number), (x, 1), xycoords=("data", "axes fraction"), xytext=(2, -2), textcoords="offset points",
        va="top", fontsize=7, color=GRAY,
    )  # fmt: skip


def _style_axes(axes: Axes, kind: str, unit: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(f"time ({unit})" if kind == "seconds" else kind)
    if kind == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _time_unit(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[int, str]:
    """Return the length in seconds and the name of a time unit: the largest unit below half of the longest run."""
    longest = 0.0
    for lines in runs.values():
        _, elapsed = _column(lines, "elapsed_seconds")
        longest = max(longest, elapsed.max(initial=0))
    for seconds, unit in UNITS:
        if longest > 2 * seconds:
            return seconds, unit
    return UNITS[-1]


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file atomically, in the format of its suffix."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    write_atomically(path, picture.getvalue())


def drawable(text: str) -> str:
    """Make characters visible as in `visible`, and replace characters without a glyph with boxes."""
    from matplotlib import get_data_path
    from matplotlib.font_manager import get_font

    file = f"{FONT.replace(' ', '')}.ttf"
    font = get_font(str(Path(get_data_path(), "fonts", "ttf", file)))
    return "".join(c if font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in visible(text))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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


def setting_label(value: Any) -> str:
    """Return a short label for the value of a setting, such as the words of a mixture."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return _shortened(text, SETTING_CHARACTERS)


def token_label(token: str) -> str:
    """Return a short label for a token."""
    return _shortened(drawable(visible(token, DOT)), TOKEN_CHARACTERS)


def _shortened(text: str, characters: int) -> str:
    """Truncate a text to a number of characters, including the ellipsis."""
    if len(text) <= characters:
        return text
    return text[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _column(lines: Sequence[Mapping[str, Any]], field: str) -> np.ndarray:
    """Return the steps and values of the lines that have a field, `[2, n]`."""
    pairs = [(line["step"], line[field]) for line in lines if field in line]
    return np.array(pairs, float).reshape(-1, 2).T


def _place(lines: Sequence[Mapping[str, Any]], kind: str, unit: float, steps: Any) -> Any:
    """Convert steps to positions on an axis. The training line of step s is recorded after s + 1 steps."""
    if kind == "step":
        return steps
    step, values = _column(lines, AXES[kind])
    return np.interp(steps, [0, *(step + 1)], [0, *(values / unit)])


def _cells(
    values: np.ndarray,
    columns: Sequence[str],
    rows: Sequence[str] | None,
    names: tuple[str, str, str],
    title: str,
    width: float = 0.3,
    limits: tuple[float, float] = (0.0, 1.0),
) -> Figure:
    """Draw a matrix as a heatmap, the first row at the top, with cells `width` inches wide.

    columns, rows: labels; rows None: indices. names: labels of the horizontal axis, the vertical axis and the color bar.
    """
    rows = [str(i) for i in range(len(values))] if rows is None else rows
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

    # Label every x-th column and every y-th row: as many as fit.
    x = math.ceil(len(below) * TICK / figure_width)
    y = math.ceil(len(left) * TICK / figure_height)
    steep: dict[str, Any] = {}
    if any(len(label) > 3 for label in below):
        steep = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(0, len(below), x), below[::x], fontsize=8, **steep)
    axes.set_yticks(range(0, len(left), y), left[::y], fontsize=8)
    axes.set(xlabel=names[0], ylabel=names[1], title=drawable(title))
    _add_bar(image, [axes], names[2])
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
