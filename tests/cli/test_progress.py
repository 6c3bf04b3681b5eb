"""Progress on standard error: only for slow commands, as one line that disappears on a terminal."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

import pytest

from jaxgpt.cli.progress import Activity, progress


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.cli.progress.DELAY", 0.02)
    monkeypatch.setattr("jaxgpt.cli.progress.EVERY", 0.02)


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
    assert re.fullmatch(r"(jaxgpt: evaluating, 75%, 0:00:00, 0:00:00 left\n)+", err)


def test_one_line_on_a_terminal_that_disappears(
    soon: None, terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, received = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with progress("evaluating") as update:
        update(3, 4)
        shown, deadline = "", time.monotonic() + 10  # the machine may be busy
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
    monkeypatch.setattr("jaxgpt.cli.progress.time.monotonic", lambda: now[0])
    activity = Activity("evaluating")
    assert str(activity) == "evaluating, 0:00:00"
    now[0] = 65.0
    activity(1, 5)
    assert str(activity) == "evaluating, 20%, 0:01:05, 0:04:20 left"
    activity.stage("reading back")
    assert str(activity) == "reading back, 0:00:00"
