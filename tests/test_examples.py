"""The files in examples/ run, learn, and write runs that the commands read."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TEXT, jaxgpt, repository


@pytest.mark.ci
def test_a_model_is_trained_and_then_fine_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text(TEXT)
    Path("other.txt").write_text(TEXT.replace("times", "plus"))
    pretrain, finetune = (
        runpy.run_path(str(repository() / "examples" / f"{name}.py")) for name in ("pretrain", "finetune")
    )
    outcome = pretrain["main"]("text.txt", 60, "runs/a")
    assert (outcome.step, outcome.stopped) == (60, False)
    assert outcome.evaluation.loss < 1.5
    assert "validation loss" in capsys.readouterr().out
    tuned, report = finetune["main"]("runs/a", "other.txt", 25, "runs/b")
    assert list(report.by_step) == [0, 25]
    assert report.by_step[25] < report.by_step[0] - 0.05
    assert tuned.evaluation.loss == report.by_step[25]
    for run in ("runs/a", "runs/b"):
        assert jaxgpt("sample", run, "--prompt", "3 plus", "--max-new-tokens", "4").code == 0


def test_a_missing_run_is_one_line() -> None:
    command = [sys.executable, str(repository() / "examples/finetune.py"), "nowhere", "text.txt"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no run at nowhere" in result.stderr
    assert "Traceback" not in result.stderr
