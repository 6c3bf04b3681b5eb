"""The files in examples/ run, learn, and write runs that the commands read."""

from __future__ import annotations

import runpy
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
    tuned, losses = finetune["main"]("runs/a", "other.txt", 50, "runs/b")
    assert list(losses.by_step) == [0, 25, 50]
    assert losses.by_step[50] < losses.by_step[0] - 0.05
    assert tuned.evaluation.loss == losses.by_step[50]
    for run in ("runs/a", "runs/b"):
        assert jaxgpt("sample", run, "--prompt", "3 plus", "--max-new-tokens", "4").code == 0


@pytest.mark.ci
def test_a_run_trained_with_muon_is_fine_tuned() -> None:
    Path("text.txt").write_text(TEXT)
    size = ("--model.n-layer", "1", "--model.n-embd", "32", "--model.n-head", "2", "--model.block-size", "32")
    steps = ("--train.steps", "1", "--train.batch-size", "8", "--optim.name", "muon", "--data.path", "text.txt")
    assert jaxgpt("train", "python-char", *size, *steps, "--out", "runs/a").code == 0
    tuned, _ = runpy.run_path(str(repository() / "examples/finetune.py"))["main"]("runs/a", "text.txt", 1, "runs/b")
    assert tuned.step == 1


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [("finetune", ["nowhere", "text.txt"], "no run at nowhere"), ("pretrain", ["no.txt"], "directory: no.txt")],
)
def test_missing_files_are_one_line(
    example: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(repository() / f"examples/{example}.py"), run_name="__main__")
    assert message in capsys.readouterr().err
