"""Results of tasks: the metrics that lm-evaluation-harness returns, and their table. This module does not need the harness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

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
        task_version: version of the task's definition; "": no version.
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
        values: values of the task or group in the result, with keys `METRIC,FILTER`.
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
