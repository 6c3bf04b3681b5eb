"""Results of tasks: the file `tasks.json` of a run, and their table. This module does not need the harness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

from jaxgpt.atomic import write_json
from jaxgpt.directories import TASKS
from jaxgpt.files import damaged, read_own_json

TITLES = ("task", "metric", "value", "+-", "samples", "shots")


@dataclass(frozen=True)
class TaskResult:
    """One metric of a task.

    Attributes:
        task: name of the task or group.
        metric: name of the metric, followed by its filter in parentheses if it has one.
        value: the metric.
        stderr: standard error over the samples, as the harness computes it; None: unknown.
        higher_is_better: whether a higher value is better; None: unknown.
        samples: number of evaluated samples.
        of: number of samples of the task; 0: unknown, as for groups.
        shots: number of examples in each prompt; None: different numbers within a group.
        task_version: version of the task's definition; "": none.
    """

    task: str
    metric: str
    value: float
    stderr: float | None = None
    higher_is_better: bool | None = None
    samples: int = 0
    of: int = 0
    shots: int | None = 0
    task_version: str = ""


def results_of(found: Mapping[str, Any]) -> list[TaskResult]:
    """Return the metrics in the result of lm-evaluation-harness; other values of a task are skipped."""
    results = []
    for task, values in (found["results"] | found.get("groups", {})).items():
        for key, value in values.items():
            metric, _, filter_label = key.partition(",")
            is_metric = bool(filter_label) and not metric.endswith("_stderr")
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_metric and is_number:
                results.append(_result(found, task, values, metric, filter_label))
    return results


def _result(
    found: Mapping[str, Any], task: str, values: Mapping[str, Any], metric: str, filter_label: str
) -> TaskResult:
    """Return a metric of a task.

    Args:
        found: result of lm-evaluation-harness.
        task: name of the task or group.
        values: its values in the result, with keys `METRIC,FILTER`.
        metric: name of the metric.
        filter_label: name of the filter of the answers; "none": no filter.
    """
    stderr = values.get(f"{metric}_stderr,{filter_label}")
    counts = found["n-samples"].get(task, {})
    version = found["versions"].get(task)
    return TaskResult(
        task=task,
        metric=metric if filter_label == "none" else f"{metric} ({filter_label})",
        value=float(values[f"{metric},{filter_label}"]),
        stderr=float(stderr) if isinstance(stderr, Real) and math.isfinite(stderr) else None,
        higher_is_better=found["higher_is_better"].get(task, {}).get(metric),
        samples=int(values.get("sample_len") or counts.get("effective", 0)),
        of=int(counts.get("original", 0)),
        shots=found["n-shot"].get(task),
        task_version="" if version in (None, "N/A", "Yaml") else str(version),
    )


def table(results: Sequence[TaskResult]) -> list[list[str]]:
    """Return the rows of a table of results, with `TITLES` first."""
    rows = [list(TITLES)]
    for result in results:
        stderr = "" if result.stderr is None else number(result.stderr)
        samples = f"{result.samples:,}"
        if result.samples < result.of:
            samples += f" of {result.of:,}"
        shots = "" if result.shots is None else str(result.shots)
        rows.append([result.task, result.metric, number(result.value), stderr, samples, shots])
    return rows


def number(value: float) -> str:
    """Format a metric: four decimals, or four digits of a large number."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3e}"


def add_results(run: Path, results: Sequence[TaskResult], facts: Mapping[str, Any]) -> None:
    """Add results to the file of a run; they replace earlier results of the same evaluation.

    The same evaluation has the same task, metric and shots, and the same `facts` except `versions` and `date`. A metric that
    is NaN or infinite, which JSON cannot represent, is omitted.

    Args:
        run: run directory.
        results: the new results.
        facts: conditions of the results: `step`, `weights`, `limit`, `chat_template`; and `versions` and `date`.

    Raises:
        UserError: if the file is damaged.
        OSError: if the file cannot be written.
    """
    entries = _entries(run)
    new = [asdict(result) | dict(facts) for result in results]
    replaced = [_key(entry) for entry in new]
    kept = [entry for entry in entries if _key(entry) not in replaced]
    finite = [entry for entry in new if math.isfinite(entry["value"])]
    write_json(run / TASKS, {"results": kept + finite})


def read_results(run: Path, step: int | None = None) -> list[tuple[TaskResult, dict[str, Any]]]:
    """Return the results of a run and the facts of each, in the order of their evaluation.

    Args:
        run: run directory.
        step: only results of the checkpoint of this step; None: of all checkpoints.

    Raises:
        UserError: if the file is damaged.
    """
    names = {field.name for field in fields(TaskResult)}
    results = []
    for entry in _entries(run):
        if step is not None and entry.get("step") != step:
            continue
        result = TaskResult(**{name: value for name, value in entry.items() if name in names})
        facts = {name: value for name, value in entry.items() if name not in names}
        results.append((result, facts))
    return results


def evaluation_settings(facts: Mapping[str, Any]) -> str:
    """Format the settings of an evaluation that differ from the defaults, such as "chat template", or ""."""
    parts = []
    if facts.get("chat_template"):
        parts.append("chat template")
    if facts.get("weights", "float32") != "float32":
        parts.append(f"{facts['weights']} weights")
    return ", ".join(parts)


def _key(entry: Mapping[str, Any]) -> list[Any]:
    """Return the values that distinguish a result from the results of other evaluations."""
    names = ("task", "metric", "step", "weights", "limit", "shots", "chat_template")
    return [entry.get(name) for name in names]


def _entries(run: Path) -> list[dict[str, Any]]:
    """Read the results of a run, [] without tasks.json; raise `UserError` if the file is damaged."""
    path = run / TASKS
    if not path.exists():
        return []
    fix = "delete it, and evaluate the tasks again"
    entries = read_own_json(path, fix).get("results")
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise damaged(path, fix)
    return entries


def _is_entry(entry: Any) -> bool:
    """Return whether a value is a result as `add_results` writes it."""
    if not isinstance(entry, dict):
        return False
    stderr = entry.get("stderr")
    shots = entry.get("shots")
    has_names = all(isinstance(entry.get(name), str) for name in ("task", "metric"))
    has_value = type(entry.get("value")) in (int, float)
    has_counts = all(type(entry.get(name, 0)) is int for name in ("samples", "of"))
    has_stderr_or_none = stderr is None or type(stderr) in (int, float)
    has_shots_or_none = shots is None or type(shots) is int
    return has_names and has_value and has_counts and has_stderr_or_none and has_shots_or_none
