"""Tasks as an evaluator of a run: when it is called, what it is given, and what stops it. Needs no harness."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import TEXT, small_run
from test_lm import tiny

import jaxgpt
from jaxgpt.config import Config, LoraConfig
from jaxgpt.lm import LM
from jaxgpt.progress import Progress
from jaxgpt.tasks.answers import AnswerSettings, GenerationRequest, answer_prompts
from jaxgpt.tasks.evaluator import TaskMetrics, TaskScores
from jaxgpt.tasks.requests import Continuation, answer_choices
from jaxgpt.tasks.results import TaskResult
from jaxgpt.trainer.evaluation import ValidationLoss
from jaxgpt.trainer.evaluators import Every, Measured, Watch
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.loop import Start, train
from jaxgpt.trainer.metrics import read_metrics


class OneChoice:
    """Loaded tasks with a single choice; the metric is its log probability."""

    def evaluate(self, lm: LM, *, progress: Progress, **options: Any) -> list[TaskResult]:
        [(log_p, _)] = answer_choices(lm, [Continuation([1, 2], [3, 4])], progress)
        return [TaskResult("quiz", "log_p", log_p, 0.5, True, 1)]


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)


def run(config: Config, evaluators: Sequence[Any]) -> Outcome:
    return train(Start(config, "out", evaluators=evaluators), Listener())


def scores(steps: int) -> Every:
    return Every(TaskScores(OneChoice()), steps)  # type: ignore[arg-type]


def evaluated() -> dict[int, float]:
    """Return the metric of the task at each step."""
    lines = read_metrics(Path("out/metrics.jsonl"))
    return {line["step"]: line["quiz/log_p"] for line in lines if "quiz/log_p" in line}


def test_tasks_score_the_weights_of_each_evaluation() -> None:
    run(small_run(eval_every=2, keep_every=2), (ValidationLoss(), scores(4)))
    found = evaluated()
    assert list(found) == [4, 8]
    for step, value in found.items():
        [(log_p, _)] = answer_choices(jaxgpt.load("out", step), [Continuation([1, 2], [3, 4])])
        assert value == pytest.approx(log_p, abs=1e-5)


PROCESS = """
import sys
from dataclasses import replace

port, index, *paths = sys.argv[1:]
sys.path[:0] = paths
from jaxgpt.config import DistributedConfig, MeshConfig
from jaxgpt.parallel.join import joined

with joined(DistributedConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=int(index))):
    from helpers import small_run
    from test_training import answers_and_choices

    answers_and_choices(replace(small_run(scan_layers=True), mesh=MeshConfig(data=1, fsdp=2)), "two")
"""


class Quiz:
    """Loaded tasks with choices and prompts; the metrics are a log probability and the characters of the answers."""

    def evaluate(self, lm: LM, *, progress: Progress, **options: Any) -> list[TaskResult]:
        choices = [Continuation([1, 2], [3, 4]), Continuation([1], [2]), Continuation([5, 6], [7])]
        log_p = sum(value for value, _ in answer_choices(lm, choices, progress))
        greedy = AnswerSettings((), 5, {"temperature": 0.0})
        prompts = [GenerationRequest(text, greedy) for text in ("1", "11", "111")]
        code = sum(map(ord, "".join(answer_prompts(lm, prompts, progress))))
        return [TaskResult("quiz", "log_p", log_p, 0.5, True, 3), TaskResult("quiz", "code", code, 0.5, True, 3)]


def answers_and_choices(config: Config, out: str) -> list[dict[str, float]]:
    """Train with the quiz; return its metrics."""
    train(Start(config, out, evaluators=(ValidationLoss(), Every(TaskScores(Quiz()), 4))), Listener())  # type: ignore[arg-type]
    lines = read_metrics(Path(out, "metrics.jsonl"))
    return [{name: line[name] for name in ("quiz/log_p", "quiz/code")} for line in lines if "quiz/code" in line]


@pytest.mark.long
def test_two_processes_answer_a_task_together_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process has all weights, and the layers are stacked."""
    one = answers_and_choices(small_run(scan_layers=True), "one")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    here = Path(__file__).parent
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    paths = [str(here), str(here.parent)]
    started = [subprocess.Popen([sys.executable, "-c", PROCESS, port, index, *paths]) for index in "01"]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    lines = read_metrics(Path("two/metrics.jsonl"))
    two = [{name: line[name] for name in ("quiz/log_p", "quiz/code")} for line in lines if "quiz/code" in line]
    assert len(two) == 2
    for found, expected in zip(two, one, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_processes_with_different_requests_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would answer a mixture of both."""
    asked = list[str]()

    def exchanged(make: Any, facts: Any) -> None:
        asked.extend(facts(make()).values())

    monkeypatch.setattr("jaxgpt.tasks.requests.process_count", lambda: 2)
    monkeypatch.setattr("jaxgpt.tasks.requests.same_on_all", exchanged)
    lm = tiny()
    for ids in ([3, 4], [3, 4], [4, 3]):
        answer_choices(lm, [Continuation([1, 2], ids)])
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_tasks_of_adapters_score_the_merged_weights() -> None:
    run(small_run(), ())
    model = jaxgpt.load("out").config.model
    adapted = replace(small_run(steps=4), model=model, init_from="out/checkpoints/8", lora=LoraConfig(rank=2))
    train(Start(adapted, "tuned", evaluators=(ValidationLoss(), scores(0))), Listener())
    [line] = [line for line in read_metrics(Path("tuned/metrics.jsonl")) if "quiz/log_p" in line]
    [(log_p, _)] = answer_choices(jaxgpt.load("tuned", "last"), [Continuation([1, 2], [3, 4])])
    assert line["quiz/log_p"] == pytest.approx(log_p, abs=1e-5)


def test_evaluators_do_not_change_the_weights() -> None:
    alone = run(small_run(), ())
    with_tasks = train(Start(small_run(), "again", evaluators=(ValidationLoss(), scores(4))), Listener())
    assert alone.evaluation is not None
    assert with_tasks.evaluation is not None
    assert alone.evaluation.ranking == with_tasks.evaluation.ranking


@pytest.mark.parametrize(("steps", "at"), [(0, [8]), (2, [2, 4, 6, 8]), (4, [4, 8]), (6, [6, 8])])
def test_every_calls_at_multiples_and_at_the_end(steps: int, at: list[int]) -> None:
    called: list[int] = []

    def evaluator(program: Any, params: Any, watch: Watch) -> Measured:
        called.append(watch.step)
        return Measured({}, 0.0)

    for step in range(2, 9, 2):
        Every(evaluator, steps)(None, None, Watch(final=step == 8, step=step))  # type: ignore[arg-type]
    assert called == at


def test_a_stopped_run_ends_the_evaluation() -> None:
    def stopped(program: Any, params: Any, watch: Watch) -> Measured:
        stopping = watch._replace(interrupted=lambda: True)
        assert TaskScores(OneChoice())(program, params, stopping) is None  # type: ignore[arg-type]
        return Measured({"checked": 1.0}, 0.0)

    run(small_run(steps=4), (ValidationLoss(), stopped))
    assert [line["checked"] for line in read_metrics(Path("out/metrics.jsonl")) if "checked" in line] == [1.0]


def test_the_printed_result_has_errors_and_the_ranking_is_lower_for_better_scores() -> None:
    better = TaskMetrics((TaskResult("quiz", "acc", 0.5, 0.05, True), TaskResult("pages", "bits_per_byte", 3.25)))
    worse = TaskMetrics((TaskResult("quiz", "acc", 0.4, 0.05, True), TaskResult("pages", "bits_per_byte", 9.0)))
    assert str(better) == "quiz acc 0.5000 +- 0.0500, pages bits_per_byte 3.2500"
    assert better.ranking < worse.ranking
    assert better.metrics == {"quiz/acc": 0.5, "quiz/acc_stderr": 0.05, "pages/bits_per_byte": 3.25}


def test_perplexities_rank_if_no_metric_is_better_when_higher() -> None:
    better = TaskMetrics(
        (TaskResult("pages", "word_perplexity", 12.0, None, False), TaskResult("quiz", "length", 900.0))
    )
    worse = TaskMetrics((TaskResult("pages", "word_perplexity", 15.0, None, False), TaskResult("quiz", "length", 1.0)))
    assert better.ranking < worse.ranking


def test_metrics_without_a_known_direction_give_no_rank() -> None:
    assert math.isnan(TaskMetrics((TaskResult("quiz", "length", 900.0),)).ranking)
