"""evaluation.json: the losses of the windows of a run, and the digest that identifies the windows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import TEXT, small_run

from jaxgpt.data.batches import Windows
from jaxgpt.data.tokens import Tokens
from jaxgpt.trainer.evaluation_file import EvaluationFile
from jaxgpt.trainer.loop import Start, train
from jaxgpt.trainer.mean_loss import summarize
from jaxgpt.trainer.metrics import comparable_evaluations, read_metrics
from jaxgpt.trainer.windows import digest, read_windows

IDS = np.arange(40, dtype=np.int32) % 7


def rows(first: int = 0, step: int = 4, T: int = 4, ids: np.ndarray = IDS, first_id: int | None = None) -> Windows:
    return Windows(Tokens([ids], first_id=first_id), np.arange(first, 30, step), T)


def test_equal_windows_have_one_digest() -> None:
    assert digest(rows()) == digest(rows(ids=np.concatenate([IDS, IDS])))


@pytest.mark.parametrize(
    "other",
    [rows(first=1), rows(step=5), rows(T=3), rows(ids=(IDS + 1) % 7), rows(first_id=6), rows(first=4)],
    ids=["starts", "stride", "length", "ids", "beginning", "fewer"],
)
def test_different_windows_have_different_digests(other: Windows) -> None:
    assert digest(other) != digest(rows())


def test_a_listener_of_two_runs_writes_the_evaluation_of_both(tmp_path: Path) -> None:
    """Both runs end at the same step."""
    listener = EvaluationFile()
    unused: Any = None
    windows = rows()
    evaluation = summarize(windows.starts_B, np.ones(len(windows.starts_B)))._replace(rows=windows)
    for name in ("one", "other"):
        run: Any = SimpleNamespace(path=tmp_path / name)
        run.path.mkdir()
        listener.started(unused, unused, run, 0)
        listener.evaluated(4, evaluation)
        assert [file.name for file in run.path.iterdir()] == ["evaluation.json"]


def test_a_run_records_the_windows_of_its_last_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    found = []
    for seed in (1, 2):
        run = Path(f"run-{seed}")
        train(Start(small_run(seed=seed, eval_windows=2), str(run)), EvaluationFile())
        *_, last = comparable_evaluations([*read_metrics(run / "metrics.jsonl")])
        losses = read_windows(run, last)
        assert losses is not None
        assert len(losses.sums_W) == last["val_windows"] > 2
        np.testing.assert_allclose(losses.sums_W.sum() / losses.counts_W.sum(), last["val_loss"], rtol=1e-12)
        found.append(losses)
    one, other = found
    assert one.windows == other.windows
    assert not np.array_equal(one.sums_W, other.sums_W)
