"""loss.png and baselines.json are written in the background, always complete, and never block or fail the run."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
from helpers import TEXT

from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.background import Background, plot_losses, read_baselines, write_baselines
from jaxgpt.config import Config, DataConfig, ModelConfig
from jaxgpt.data import Data, open_data
from jaxgpt.report.report import report_on
from jaxgpt.study.plot import draw_baselines, new_figure

RUN = Run(Path())


def test_requests_never_block_and_the_last_one_is_served() -> None:
    """Requests during the work are served by one more run; failures are reported, and later requests are served."""
    begun, go_on = threading.Event(), threading.Event()
    seen, asked, errors = list[int](), [0], list[Exception]()

    def work() -> None:
        seen.append(asked[0])
        begun.set()
        assert go_on.wait(10)
        if len(seen) == 2:
            raise OSError("disk full")

    background = Background(work, errors.append)
    background.start()
    assert begun.wait(10)
    for asked[0] in range(1, 5):
        background.start()
    go_on.set()
    background.close()
    assert seen[-1] == 4
    assert len(seen) == 2
    assert [str(e) for e in errors] == ["disk full"]
    background.close()
    assert len(seen) == 2
    background.start()
    background.close()
    assert len(seen) == 3


def test_the_plot_is_replaced_atomically(monkeypatch: pytest.MonkeyPatch) -> None:
    RUN.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(2)))
    plot_losses(RUN, "a $title^")
    data = RUN.plot.read_bytes()
    assert (data[:8], data[-8:-4]) == (b"\x89PNG\r\n\x1a\n", b"IEND")
    monkeypatch.setattr("jaxgpt.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        plot_losses(RUN, "title")
    assert RUN.plot.read_bytes() == data


@pytest.fixture
def data() -> Data:
    Path("text.txt").write_text(TEXT)
    return open_data(Config(model=ModelConfig(block_size=8), data=DataConfig(path="text.txt")))


def test_baselines_equal_the_report_and_are_computed_once(data: Data) -> None:
    write_baselines(data, RUN.baselines)
    found, report = read_baselines(RUN.baselines), report_on(data)
    assert found == pytest.approx({name: report["baselines"][name]["loss"] for name in found})
    assert list(found) == ["uniform", "unigram", "bigram", "trigram"]
    assert json.loads(RUN.baselines.read_text())["held_out"] is True
    RUN.baselines.write_text('{"losses": {"uniform": 4.5, "unigram": "3", "bigram": true}}')
    write_baselines(data, RUN.baselines)
    assert read_baselines(RUN.baselines) == {"uniform": 4.5}, "the file is kept"


@pytest.mark.parametrize("content", ["", "[]", '{"losses": 3}', '{"losses": {"a": 1, "a": 2}}', "\0"])
def test_damaged_baselines_are_ignored(content: str) -> None:
    RUN.baselines.write_text(content)
    assert read_baselines(RUN.baselines) == {}


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
