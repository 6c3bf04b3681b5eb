"""loss.png and baselines.json are written in the background, always complete, and never block or fail the run."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
from helpers import TEXT

from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.background import Baselines, LossPlot, read_baselines
from jaxgpt.config import Config, DataConfig, ModelConfig
from jaxgpt.data import open_data
from jaxgpt.report.report import report_on
from jaxgpt.study.plot import draw_baselines, new_figure

RUN = Run(Path())
METRICS, IMAGE = RUN.metrics, RUN.plot


def add(step: int) -> None:
    with METRICS.open("a") as f:
        f.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def test_updates_never_block_and_the_last_state_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of updates during a plot, close draws one more, or none if there is nothing new."""
    go_on, lines = threading.Event(), []

    def slow(run: Run, title: str) -> None:
        lines.append(run.metrics.read_text().count("\n"))
        assert go_on.wait(10)

    monkeypatch.setattr("jaxgpt.cli.background.plot_losses", slow)
    plot = LossPlot(RUN, "title", pytest.fail)
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
    plot = LossPlot(RUN, "a $title^", pytest.fail)
    plot.close()
    data = IMAGE.read_bytes()
    assert (data[:8], data[-8:-4]) == (b"\x89PNG\r\n\x1a\n", b"IEND")
    add(2)
    monkeypatch.setattr("jaxgpt.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    errors: list[Exception] = []
    plot = LossPlot(RUN, "title", errors.append)
    plot.close()
    assert [str(e) for e in errors] == ["disk full"]
    assert IMAGE.read_bytes() == data


def test_baselines_equal_the_report_and_are_computed_once() -> None:
    Path("text.txt").write_text(TEXT)
    config = Config(model=ModelConfig(block_size=8), data=DataConfig(path="text.txt"))
    data, path = open_data(config), Path("baselines.json")
    for _ in range(2):
        baselines = Baselines(data, path, pytest.fail)
        baselines.start()
        baselines.close()
    found = read_baselines(path)
    report = report_on(data)
    assert found == pytest.approx({name: report["baselines"][name]["loss"] for name in found})
    assert list(found) == ["uniform", "unigram", "bigram", "trigram"]
    assert json.loads(path.read_text())["held_out"] is True
    path.write_text('{"losses": {"uniform": 4.5, "unigram": "3", "bigram": true}}')
    baselines = Baselines(data, path, pytest.fail)
    baselines.start()
    baselines.close()
    assert read_baselines(path) == {"uniform": 4.5}, "the file is kept"


@pytest.mark.parametrize("content", ["", "[]", '{"losses": 3}', '{"losses": {"a": 1, "a": 2}}', "\0"])
def test_damaged_baselines_are_ignored(content: str) -> None:
    Path("baselines.json").write_text(content)
    assert read_baselines(Path("baselines.json")) == {}


def test_baselines_that_cannot_be_written_do_not_fail_the_run() -> None:
    Path("text.txt").write_text(TEXT)
    data = open_data(Config(model=ModelConfig(block_size=8), data=DataConfig(path="text.txt")))
    errors: list[Exception] = []
    baselines = Baselines(data, Path("missing/baselines.json"), errors.append)
    baselines.start()
    baselines.close()
    assert [type(e) for e in errors] == [FileNotFoundError]


def test_labels_of_baselines_do_not_overlap() -> None:
    figure = new_figure(7, 4)
    axes = figure.subplots()
    axes.plot([0, 1], [6, 1])
    draw_baselines(axes, {"uniform": 6.1, "unigram": 3.0, "bigram": 2.99, "trigram": 2.98})
    figure.canvas.draw()
    boxes = sorted((label.get_window_extent() for label in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
