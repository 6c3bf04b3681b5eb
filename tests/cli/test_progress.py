"""Progress: one line on a terminal, plain lines otherwise; on standard error only for slow commands."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from helpers import TEXT, small_run

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.console import progress
from jaxgpt.cli.run_printer import RunPrinter
from jaxgpt.data import open_data
from jaxgpt.progress import Progress
from jaxgpt.trainer.build import build


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.cli.console.DELAY", 0.02)
    monkeypatch.setattr("jaxgpt.cli.console.EVERY", 0.02)


def test_quick_commands_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("evaluating") as update:
        update(1, 2)
    assert capfd.readouterr() == ("", "")


def test_plain_lines_without_a_terminal(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("evaluating") as update:
        update(3, 4)
        time.sleep(0.3)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"(evaluating  75%  0:00:00  0:00:00 left\n)+", err)


def test_one_line_on_a_terminal_that_disappears(
    soon: None, terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, received = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with progress("evaluating") as update:
        update(3, 4)
        shown = ""
        deadline = time.monotonic() + 10  # the machine may be busy
        while "75%" not in shown and time.monotonic() < deadline:
            time.sleep(0.05)
            shown += received()
        print("{}")
        assert sys.stdout.getvalue() == "{}\n", "other output stays on standard output"
    assert "evaluating" in shown
    assert "75%" in shown
    assert "\x1b[?25l" in shown
    end = received()
    assert "\x1b[2K" in end, "the line is erased"
    assert "\x1b[?25h" in end, "and the cursor is visible again"


def test_closed_standard_error(soon: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress("evaluating"):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_time_left_is_proportional(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("jaxgpt.progress.time.monotonic", lambda: now[0])
    activity = Progress("evaluating")
    assert str(activity) == "evaluating  0:00:00"
    now[0] = 65.0
    activity(1, 5)
    assert str(activity) == "evaluating  20%  0:01:05  0:04:20 left"
    activity.stage("reading back")
    assert str(activity) == "reading back  0:00:00"


METRICS = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0}


@contextmanager
def reporting(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunPrinter, Callable[[], str]]]:
    """Return a started printer on a terminal, and a function that returns what the terminal shows."""
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

    monkeypatch.setattr("jaxgpt.cli.run_summary.baselines", lambda data: None)
    # No checkpoint is on the disk.
    monkeypatch.setattr("jaxgpt.cli.run_printer.read_info", lambda checkpoint: Info(157))
    with RunPrinter() as printer:
        printer.started(program, data, Run(Path()), 157)
        yield printer, shown


def test_the_line_follows_the_run(terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with reporting(terminal, monkeypatch) as (printer, shown):
        printer.stage("compiling")
        assert re.search(r"step   157/300  compiling  0:00:0\d", shown())
        printer.stage("")
        printer.compiled(6.14)
        printer.progress({"step": 157} | METRICS)
        after = shown()
        assert "compiled in 6.1 s" in after
        assert re.search(r"step   158/300  loss 2.5000  lr 1.00e-03(\s|$)", after), (
            "speed and time left are not known yet"
        )
        printer.progress({"step": 158, "tokens_per_second": 12345.6, "seconds_left": 83.0} | METRICS)
        assert "loss 2.5000  lr 1.00e-03  12,346 tok/s  0:01:23 left" in shown()
        printer.stage("evaluating", 3, 12)
        assert "loss 2.5000  evaluating  25%  0:00:0" in shown()
