"""tasks.json: the results of tasks of a run, and the conditions of their evaluations. This module does not need the harness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from jaxgpt.atomic import write_json
from jaxgpt.directories import TASKS
from jaxgpt.files import damaged, read_own_json
from jaxgpt.tasks.results import TaskResult


class Conditions(TypedDict, total=False):
    """The conditions of an evaluation of tasks. Files of other versions may lack some conditions."""

    step: int  # step of the checkpoint
    weights: str  # type that the weights were rounded to
    limit: int  # maximum number of samples of each task; 0: all
    chat_template: bool  # whether the prompts were rendered with the chat template
    versions: dict[str, str]  # versions of jaxgpt (`provenance.versions`) and of the harness, `lm_eval`
    date: str  # time of the evaluation, in ISO format


class TaskEntry(NamedTuple):
    """A result of `jaxgpt eval RUN --tasks`, and the conditions of its evaluation."""

    result: TaskResult
    conditions: Conditions


def add_results(run: Path, results: Sequence[TaskResult], conditions: Conditions) -> None:
    """Add results to the file of a run; they replace earlier results of the same evaluation.

    The same evaluation has the same task, metric and shots, and the same conditions except `versions` and `date`. A metric
    that is NaN or infinite, which JSON cannot represent, is omitted.

    Args:
        run: run directory.
        results: the new results.
        conditions: conditions of all new results.

    Raises:
        UserError: if the file is damaged.
        OSError: if the file cannot be written.
    """
    entries = _entries(run)
    new = [asdict(result) | dict(conditions) for result in results]
    replaced = [_key(entry) for entry in new]
    kept = [entry for entry in entries if _key(entry) not in replaced]
    finite = [entry for entry in new if math.isfinite(entry["value"])]
    write_json(run / TASKS, {"results": kept + finite})


def read_results(run: Path, step: int | None = None) -> list[TaskEntry]:
    """Return the results of a run and their conditions, in the order of their evaluation.

    Args:
        run: run directory.
        step: only results of the checkpoint of this step; None: of all checkpoints.

    Raises:
        UserError: if the file is damaged.
    """
    names = {field.name for field in fields(TaskResult)}
    results: list[TaskEntry] = []
    for entry in _entries(run):
        if step is not None and entry.get("step") != step:
            continue
        result = TaskResult(**{name: value for name, value in entry.items() if name in names})
        conditions = {name: value for name, value in entry.items() if name not in names}
        results.append(TaskEntry(result, cast(Conditions, conditions)))
    return results


def evaluation_settings(conditions: Conditions) -> str:
    """Format the settings of an evaluation that differ from the defaults, such as "chat template", or ""."""
    parts = []
    if conditions.get("chat_template"):
        parts.append("chat template")
    if conditions.get("weights", "float32") != "float32":
        parts.append(f"{conditions['weights']} weights")
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
