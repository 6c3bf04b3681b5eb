"""loss.png: training and validation loss against steps."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from jaxgpt.checkpoint.run import write_atomically
from jaxgpt.trainer.metrics import read_metrics


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
    """Draw a metrics file as a PNG, written atomically. Needs no display and no global matplotlib state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = list(read_metrics(metrics))
    train, val = (
        [(m["step"], m[name]) for m in lines if type(m.get(name)) in (int, float)] for name in ("loss", "val_loss")
    )
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="training (single batch)")
    if val:
        axes.plot(*zip(*val, strict=True), color="#d94801", marker="o", markersize=4, label="validation")
        step, loss = min(val, key=lambda point: point[1])
        axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a folder's name may contain a dollar sign
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if train or val:
        axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    write_atomically(image, png.getvalue())
