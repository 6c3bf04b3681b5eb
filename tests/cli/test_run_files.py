"""baselines.json and loss.png of a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from helpers import TEXT

from jaxgpt.config import Config, DataConfig, ModelConfig
from jaxgpt.data import open_data
from jaxgpt.report.baselines import baselines, read_baselines
from jaxgpt.report.describe import describe
from jaxgpt.study.curves import draw_baselines
from jaxgpt.study.figure import new_figure


def test_baselines_equal_the_report() -> None:
    Path("text.txt").write_text(TEXT)
    data = open_data(Config(model=ModelConfig(block_size=8), data=DataConfig(path="text.txt")))
    Path("baselines.json").write_text("{}")
    assert read_baselines(Path()) == {"losses": {}}
    found = baselines(data)
    report = describe(data)
    assert found is not None
    Path("baselines.json").write_text(json.dumps(found))
    read = read_baselines(Path())
    assert list(read["losses"]) == ["uniform", "unigram", "bigram", "trigram"]
    assert read["losses"] == pytest.approx({n: report["baselines"][n]["loss"] for n in found["losses"]})
    assert read["bytes_per_token"] == report["bytes_per_token"] == 1


def test_labels_of_baselines_do_not_overlap() -> None:
    figure = new_figure(7, 4)
    axes = figure.subplots()
    axes.plot([0, 1], [6, 1])
    draw_baselines(axes, {"uniform": 6.1, "unigram": 3.0, "bigram": 2.99, "trigram": 2.98})
    figure.draw_without_rendering()
    boxes = sorted((label.get_window_extent() for label in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
