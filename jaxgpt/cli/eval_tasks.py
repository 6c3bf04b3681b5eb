"""jaxgpt eval RUN --tasks NAMES"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxgpt.cli.console import note, progress
from jaxgpt.cli.options import Weights
from jaxgpt.cli.output import Facts, aligned, columns, finite_or_none, print_result

if TYPE_CHECKING:
    from jaxgpt.lm import LM
    from jaxgpt.tasks.record import Conditions
    from jaxgpt.tasks.results import TaskResult


class TaskOptions(NamedTuple):
    """The options of `jaxgpt eval` for tasks.

    Attributes:
        names: names or YAML files, separated by commas.
        path: directory with YAML files of further tasks.
        limit: number of samples of each task; 0: all.
        shots: number of examples in each prompt, unless a task defines 0; -1: as the task defines.
        chat_template: render the prompts with the model's chat template.
    """

    names: str
    path: str
    limit: int
    shots: int
    chat_template: bool


def eval_tasks(run: str, checkpoint: str, weights: Weights, options: TaskOptions, json: bool) -> int:
    """Evaluate a run on tasks, print the results and record them in the run's tasks.json."""
    from jaxgpt.checkpoint.run import open_run
    from jaxgpt.provenance import versions
    from jaxgpt.tasks.load import harness_version

    recorded = open_run(Path(run))
    version = harness_version()
    lm, results = _evaluate(run, checkpoint, weights, options)

    conditions: Conditions = {
        "step": int(lm.source.rpartition(" ")[2]),  # "RUN, step N"
        "weights": weights,
        "limit": options.limit,
        "chat_template": options.chat_template,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions() | {"lm_eval": version},
    }
    _keep(recorded.path, results, conditions)
    about = {
        "model": lm.source,
        "tasks": f"lm-evaluation-harness {version}",
        "settings": [
            f"{weights} weights" if weights != "float32" else "",
            "chat template" if options.chat_template else "",
        ],
    }
    values = [asdict(result) | {"value": finite_or_none(result.value)} for result in results]
    return print_result(json, {"run": run, "model": lm.source, **conditions, "tasks": values}, _text(about, results))


def _evaluate(run: str, checkpoint: str, weights: Weights, options: TaskOptions) -> tuple[LM, list[TaskResult]]:
    """Load tasks and a model, and evaluate the model; return the model and the results."""
    from jaxgpt.lm import load
    from jaxgpt.tasks.load import open_tasks, split_names
    from jaxgpt.tasks.record import read_results

    with progress("finding the tasks") as activity:
        shots = None if options.shots < 0 else options.shots
        tasks = open_tasks(split_names(options.names), options.path, shots, activity)

        read_results(Path(run))  # integrity check before the work
        activity.stage("loading")
        lm = load(run, checkpoint, None if weights == "float32" else weights)

        activity.stage("evaluating")
        limit = options.limit or None
        results = tasks.evaluate(lm, limit=limit, chat_template=options.chat_template, progress=activity)
    return lm, results


def _keep(run: Path, results: Sequence[TaskResult], conditions: Conditions) -> None:
    """Record results in a run. Results that cannot be recorded cause a note, not an error: they are printed anyway."""
    from jaxgpt.tasks.record import add_results

    unknown = [f"{result.task} {result.metric}" for result in results if not math.isfinite(result.value)]
    if unknown:
        note(f"metrics that are NaN or infinite are not kept in {run}: {', '.join(unknown)}")
    try:
        add_results(run, results, conditions)
    except OSError as e:
        note(f"the results are not kept in {run}: {e.strerror}")


def _text(about: Facts, results: Sequence[TaskResult]) -> str:
    """Format results as a table below the facts about their evaluation."""
    from jaxgpt.tasks.results import table

    rows = columns(table(results))
    return f"{aligned(about)}\n\n{rows}\n\n+- is the standard error over the samples of a task"
