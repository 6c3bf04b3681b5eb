"""loss.png is drawn in the background, always complete, and never blocks or fails the run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from jaxgpt.trainer.plots import LossPlot

METRICS, IMAGE = Path("metrics.jsonl"), Path("loss.png")


def add(step: int) -> None:
    with METRICS.open("a") as f:
        f.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def test_updates_never_block_and_the_last_state_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of updates during a plot, close draws one more, or none if there is nothing new."""
    go_on, lines = threading.Event(), []

    def slow(metrics: Path, image: Path, title: str) -> None:
        lines.append(metrics.read_text().count("\n"))
        assert go_on.wait(10)

    monkeypatch.setattr("jaxgpt.trainer.plots.plot_losses", slow)
    plot = LossPlot(METRICS, IMAGE, "title", pytest.fail)
    for step in range(5):
        add(step)
        plot.update()
    go_on.set()
    plot.close()
    # A line written between checking the file and reading it is drawn twice.
    assert lines[-1] == 5
    assert len(lines) <= 2
    drawn = len(lines)
    plot.close()
    assert len(lines) == drawn


def test_the_plot_is_replaced_atomically(monkeypatch: pytest.MonkeyPatch) -> None:
    add(0)
    add(1)
    plot = LossPlot(METRICS, IMAGE, "a $title^", pytest.fail)
    plot.close()
    data = IMAGE.read_bytes()
    assert (data[:8], data[-8:-4]) == (b"\x89PNG\r\n\x1a\n", b"IEND")
    add(2)
    monkeypatch.setattr("jaxgpt.checkpoint.run.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    errors: list[Exception] = []
    plot = LossPlot(METRICS, IMAGE, "title", errors.append)
    plot.close()
    assert [str(e) for e in errors] == ["disk full"]
    assert IMAGE.read_bytes() == data
