"""loss.png: training and validation loss against steps, and the baselines of the data."""

from __future__ import annotations

import io
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.checkpoint.run import Run
from jaxgpt.files import write_atomically
from jaxgpt.trainer.baselines import read_baselines
from jaxgpt.trainer.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"  # comes with matplotlib
GRAY = "#6b7280"
LABEL = 0.045  # height of a label, relative to the axes


class LossPlot:
    """Keep loss.png up to date in another thread, so that training does not wait for matplotlib.

    Args:
        metrics: metrics.jsonl.
        image: the file to write.
        title: of the plot.
        failed: called, in that thread, with the error if the plot cannot be drawn. Training continues.
    """

    def __init__(self, metrics: Path, image: Path, title: str, failed: Callable[[Exception], None]) -> None:
        self._draw = lambda: plot_losses(metrics, image, title)
        self._metrics, self._failed = metrics, failed
        self._drawn = -1  # bytes of the metrics file in the last plot
        self._thread: threading.Thread | None = None
        # The first import of matplotlib on a machine scans all fonts and logs a message.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

    def update(self) -> None:
        """Draw the plot again, unless a drawing is in progress: then the next update will include the new lines."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._update, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Draw the final plot, and wait for it."""
        if self._thread is not None:
            self._thread.join()
        self._update()

    def _update(self) -> None:
        try:
            size = self._metrics.stat().st_size
            if size != self._drawn:
                self._draw()
                self._drawn = size
        except Exception as e:
            self._failed(e)


def plot_losses(metrics: Path, image: Path, title: str) -> None:
    """Draw the losses of a run and its baselines as a PNG, written atomically. Needs no display and no global state.

    Args:
        metrics: metrics.jsonl; baselines.json beside it is drawn too, if it exists.
        image: the file to write.
        title: of the plot.
    """
    lines = list(read_metrics(metrics))
    train, val = (
        [(m["step"], m[name]) for m in lines if type(m.get(name)) in (int, float)] for name in ("loss", "val_loss")
    )
    figure = new_figure(7, 4)
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="training (single batch)")
    if val:
        axes.plot(*zip(*val, strict=True), color="#d94801", marker="o", markersize=4, label="validation")
        step, loss = min(val, key=lambda point: point[1])
        axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(drawable(title), parse_math=False, fontfamily=FONT)  # the name of a folder may have any character
    plain(axes)
    if train or val:
        draw_baselines(axes, read_baselines(Run(metrics.parent).baselines))
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.95), edgecolor="none", framealpha=0.9)
    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    write_atomically(image, png.getvalue())


def drawable(text: str) -> str:
    """Escape characters that cannot be printed, and replace those that matplotlib's own font lacks by a box.

    Draw the result with `parse_math=False`, so that dollar signs are not formulas.
    """
    from matplotlib import get_data_path
    from matplotlib.font_manager import get_font

    font = get_font(str(Path(get_data_path(), "fonts", "ttf", f"{FONT.replace(' ', '')}.ttf")))
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return "".join(c if font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in escaped)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> None:
    """Draw a light grid, and no frame at the top and right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_baselines(axes: Axes, losses: Mapping[str, float], labels: bool = True) -> None:
    """Draw a horizontal line for each loss, labeled on the right, behind the curves drawn so far."""
    for loss in losses.values():
        axes.axhline(loss, color="#9ca3af", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    low, high = axes.get_ylim()
    place = -math.inf
    for name, loss in sorted(losses.items(), key=lambda item: item[1]) if labels else ():
        place = max(loss, place + LABEL * (high - low))  # labels must not overlap
        axes.annotate(
            f"{name} {loss:.2f}", (1, place), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=GRAY, annotation_clip=False,
        )  # fmt: skip
