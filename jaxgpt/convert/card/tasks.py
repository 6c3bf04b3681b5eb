"""The section of a model card about the tasks that the exported checkpoint was evaluated on."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.checkpoint.info import Info
from jaxgpt.tasks.record import evaluation_settings, read_results
from jaxgpt.tasks.results import TITLES, table


def tasks_section(run: Path, info: Info) -> str:
    """Return the results of `jaxgpt eval RUN --tasks` for the exported checkpoint, or "" if there are no results."""
    entries = read_results(run, info.step)
    if not entries:
        return ""
    titles = [*TITLES, "settings"]
    lines = ["## Tasks\n", _row(titles), "|" + "---|" * len(titles)]
    _, *rows = table([entry.result for entry in entries])
    for row, entry in zip(rows, entries, strict=True):
        lines.append(_row([*row, evaluation_settings(entry.conditions)]))

    versions = {entry.conditions.get("versions", {}).get("lm_eval", "unknown") for entry in entries}
    measured_by = f"lm-evaluation-harness {', '.join(sorted(versions))}"
    lines.append(f"\nMeasured by {measured_by}; +- is the standard error over the samples.\n")
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    """Format a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
