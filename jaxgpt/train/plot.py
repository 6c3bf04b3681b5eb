"""loss.png: training and validation loss against steps."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.train.metrics import read_metrics


def plot_losses(metrics: Path, image: Path, title: str) -> None:
    """Draw a metrics file. Needs no display."""
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
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="training (each a batch)")
    if val:
        axes.plot(*zip(*val, strict=True), color="#d94801", marker="o", markersize=4, label="validation")
        step, loss = min(val, key=lambda point: point[1])
        axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a folder's name may hold a dollar sign
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if train or val:
        axes.legend(frameon=False)
    figure.savefig(image, dpi=120)
