"""Results of tasks stay in the run: in its file, in `info`, and in the model card of the evaluated checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import jaxgpt, lm_of

from jaxgpt.convert.export_model import export_model
from jaxgpt.directories import TASKS
from jaxgpt.errors import UserError
from jaxgpt.lm import save
from jaxgpt.tasks.record import Conditions, add_results, read_results
from jaxgpt.tasks.results import TaskResult, results_of, table

ACC = TaskResult("quiz", "acc", 0.25, 0.05, True, samples=100, of=2000, shots=5, task_version="1.0")
FACTS: Conditions = {
    "step": 0,
    "weights": "float32",
    "limit": 100,
    "chat_template": False,
    "versions": {"lm_eval": "0.4.13"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(lm_of("gpt2"), tmp_path / "run")
    return tmp_path / "run"


def test_results_are_read_back_and_repeated_ones_replace_earlier_ones(tmp_path: Path) -> None:
    shorter = FACTS | {"limit": 10}
    add_results(tmp_path, [ACC], FACTS)
    add_results(tmp_path, [ACC], shorter)
    add_results(tmp_path, [replace(ACC, value=0.5)], FACTS | {"date": "later"})
    found = read_results(tmp_path)
    assert [(result.value, facts["limit"]) for result, facts in found] == [(0.25, 10), (0.5, 100)]
    assert not read_results(tmp_path, step=7)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"results": 1}',
        '{"results": [{"task": "a", "metric": "acc", "value": "high"}]}',
        '{"results": [{"task": "a", "metric": "acc", "value": 0.5, "shots": "five"}]}',
    ],
    ids=str,
)
def test_a_damaged_file_raises_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / TASKS).write_text(content)
    with pytest.raises(UserError, match=f"{TASKS} is damaged: delete it, and evaluate the tasks again"):
        read_results(tmp_path)


def test_info_prints_the_results_with_their_errors(run: Path) -> None:
    add_results(run, [ACC], FACTS)
    assert "quiz acc 0.2500 +- 0.0500 (step 0, 100 samples, 5 shots)" in jaxgpt("info", str(run)).out
    [entry] = jaxgpt("info", str(run), "--json").json["run"]["tasks"]
    assert entry["stderr"] == 0.05
    assert entry["versions"] == {"lm_eval": "0.4.13"}


def test_the_card_has_the_results_of_the_exported_checkpoint_only(run: Path, tmp_path: Path) -> None:
    add_results(run, [ACC], FACTS | {"weights": "int8"})
    add_results(run, [replace(ACC, task="later")], FACTS | {"step": 9})
    export_model(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| quiz | acc | 0.2500 | 0.0500 | 100 of 2,000 | 5 | int8 weights |" in card
    assert "lm-evaluation-harness 0.4.13" in card
    assert "later" not in card


def test_an_overwritten_run_does_not_keep_the_results(run: Path) -> None:
    add_results(run, [ACC], FACTS)
    save(lm_of("gpt2"), run, overwrite=True)
    assert not read_results(run)


def test_the_result_of_the_harness_becomes_rows() -> None:
    found: dict[str, Any] = {
        "results": {
            "sums": {"alias": "sums", "sample_len": 20, "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"},
        },
        "groups": {"all": {"alias": "all", "sample_len": 60, "acc,none": 0.3, "acc_stderr,none": 0.1}},
        "versions": {"sums": 2.0, "all": "N/A"},
        "n-shot": {"sums": 4},
        "n-samples": {"sums": {"original": 50, "effective": 20}},
        "higher_is_better": {"sums": {"exact_match": True}},
    }
    first, second = results_of(found)
    assert first == TaskResult("sums", "exact_match (strict)", 0.5, None, True, 20, 50, 4, "2.0")
    assert second == TaskResult("all", "acc", 0.3, 0.1, None, 60, 0, None, "")
    assert table([first, second])[1:] == [
        ["sums", "exact_match (strict)", "0.5000", "", "20 of 50", "4"],
        ["all", "acc", "0.3000", "0.1000", "60", ""],
    ]


def test_results_survive_json(tmp_path: Path) -> None:
    add_results(tmp_path, [ACC], FACTS)
    [entry] = json.loads((tmp_path / TASKS).read_text())["results"]
    assert entry["task_version"] == "1.0"
    assert read_results(tmp_path)[0][0] == ACC


def test_a_metric_that_is_not_finite_does_not_lose_the_others(tmp_path: Path) -> None:
    """JSON has no NaN; a perplexity may overflow, and the error of a single sample is NaN."""
    found: dict[str, Any] = {
        "results": {"pages": {"word_perplexity,none": math.inf, "acc,none": 0.5, "acc_stderr,none": math.nan}},
        "versions": {},
        "n-shot": {},
        "n-samples": {},
        "higher_is_better": {},
    }
    perplexity, accuracy = results_of(found)
    assert (perplexity.value, accuracy.stderr) == (math.inf, None)
    add_results(tmp_path, [perplexity, accuracy], FACTS)
    assert [result for result, _ in read_results(tmp_path)] == [accuracy]
