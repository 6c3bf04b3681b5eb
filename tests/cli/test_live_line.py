"""The live line of training, on a terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from unittest.mock import MagicMock

import pytest
from helpers import TEXT, small_run

from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.report import TrainReport
from jaxgpt.data import open_data
from jaxgpt.trainer.program import build

METRICS = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0}


@contextmanager
def reporting(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TrainReport, Callable[[], str]]]:
    """Return a started report on a terminal, and a function that returns what the terminal shows."""
    Path("text.txt").write_text(TEXT)
    config = small_run(steps=300)
    data = open_data(config)
    program = build(config.with_model(vocab_size=data.tokenizer.vocab_size))
    stream, received = terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)

    def shown() -> str:
        time.sleep(0.3)  # the line is redrawn four times a second
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", received())

    monkeypatch.setattr("jaxgpt.cli.report.Background", MagicMock())
    with TrainReport() as report:
        report.started(program, data, Run(Path()), 157)
        yield report, shown


def test_the_line_follows_the_run(terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with reporting(terminal, monkeypatch) as (report, shown):
        report.stage("compiling")
        assert re.search(r"step   157/300 \S+ compiling, 0:00:0\d", shown())
        report.stage("")
        report.compiled(6.14)
        report.progress({"step": 157} | METRICS)
        after = shown()
        assert "compiled in 6.1 s" in after
        assert re.search(r"step   158/300 \S+ loss 2.5000  lr 1.00e-03(\s|$)", after), (
            "speed and time left are not known yet"
        )
        report.progress({"step": 158, "tokens_per_second": 12345.6, "seconds_left": 83.0} | METRICS)
        assert "loss 2.5000  lr 1.00e-03  12,346 tok/s  0:01:23 left" in shown()
        report.stage("evaluating", 3, 12)
        assert "loss 2.5000  evaluating, 25%, 0:00:0" in shown()
