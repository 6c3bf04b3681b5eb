"""jaxgpt eval RUN --tasks NAMES"""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxgpt.cli.options import Weights
from jaxgpt.cli.output import aligned, columns, known, note, print_result, progress


def eval_tasks(
    run: str,
    checkpoint: str,
    weights: Weights,
    names: str,
    path: str,
    limit: int,
    shots: int,
    chat_template: bool,
    json: bool,
) -> int:
    """Evaluate a run on tasks, print the results and keep them in the run. The arguments are options of `jaxgpt eval`."""
    from jaxgpt.checkpoint.run import open_run
    from jaxgpt.tasks.load import harness_version, open_tasks, split_names

    recorded = open_run(Path(run))
    version = harness_version()
    with progress("finding the tasks") as activity:
        tasks = open_tasks(split_names(names), path, None if shots < 0 else shots, activity)

        from jaxgpt.lm import load
        from jaxgpt.provenance import versions
        from jaxgpt.tasks.record import add_results, read_results, table

        read_results(recorded.path)  # integrity check before the work
        activity.stage("loading")
        lm = load(run, checkpoint, None if weights == "float32" else weights)
        step = int(lm.source.rpartition(" ")[2])  # "RUN, step N"

        activity.stage("evaluating")
        results = tasks.evaluate(lm, limit=limit or None, chat_template=chat_template, progress=activity)

    # Keep the results in the run; they are printed in any case.
    facts: dict[str, Any] = {
        "step": step,
        "weights": weights,
        "limit": limit,
        "chat_template": chat_template,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions() | {"lm_eval": version},
    }
    unknown = [f"{each.task} {each.metric}" for each in results if not math.isfinite(each.value)]
    if unknown:
        note(f"NaN or infinite, and not kept in {recorded.path}: {', '.join(unknown)}")
    try:
        add_results(recorded.path, results, facts)
    except OSError as e:
        note(f"the results are not kept in {recorded.path}: {e.strerror}")

    settings = f"{weights} weights" if weights != "float32" else ""
    head = aligned(
        {
            "model": lm.source,
            "tasks": f"lm-evaluation-harness {version}",
            "settings": [settings, "chat template" if chat_template else ""],
        }
    )
    text = f"{head}\n\n{columns(table(results))}\n\n+- is the standard error over the samples of a task"
    values = [asdict(each) | {"value": known(each.value)} for each in results]
    return print_result(json, {"run": run, "model": lm.source, **facts, "tasks": values}, text)
