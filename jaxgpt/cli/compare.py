"""jaxgpt compare RUN RUN ... [--json]"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.options import Json
from jaxgpt.cli.output import columns, finite_or_none, print_result
from jaxgpt.cli.recorded_run import RecordedRun, read_recorded
from jaxgpt.errors import UserError, plural

if TYPE_CHECKING:
    from jaxgpt.study.difference import Difference
    from jaxgpt.study.seeds import SeedGroup

ERROR_OF_SEEDS = "+- is the standard error over seeds, on the same validation windows"
ERROR_OF_WINDOWS = "+- of a difference is the standard error over seeds and validation windows"


def compare(*runs: str, json: Json = False) -> int:
    """Compare the final validation losses of runs; runs that differ only in their seed are a group.

    Prints the mean loss of each group with its standard error over seeds, and
    whether the best group can be distinguished from each of the other groups: in pairs
    of runs with equal seeds if there are at least two pairs, otherwise with Welch's
    t-test. The error includes the choice of the validation windows if all runs were
    evaluated on the same windows. If two groups cannot be distinguished, the command
    prints advice, such as the number of seeds that would suffice. All runs must have
    the same objective, tokenizer, validation data and number of validation windows.

    jaxgpt compare runs/adamw-1 runs/adamw-2 runs/adamw-3 runs/muon-1 runs/muon-2 runs/muon-3
    jaxgpt compare runs/* --json

    Args:
        runs: finished runs
    """
    if len(runs) < 2:
        raise UserError("missing arguments: two or more runs, as in jaxgpt compare runs/a runs/b")
    from jaxgpt.checkpoint.run import open_run

    recorded = read_recorded({name: open_run(Path(name)) for name in runs})
    if len(recorded) < len(runs):
        raise UserError(f"a run is given twice: {' '.join(runs)}; pass each run once")
    groups = seed_groups(recorded)
    return print_result(json, as_json(groups), describe(groups))


def seed_groups(runs: Mapping[str, RecordedRun]) -> list[SeedGroup]:
    """Group finished runs that differ only in their seed.

    Raises:
        UserError: if a run has no validation loss or has not finished, if its objective or evaluation differs from the
            first run, if its record of the validation windows is damaged, or if two runs have equal settings and seeds.
    """
    from jaxgpt.study.seeds import FinishedRun, final_evaluation, group_runs
    from jaxgpt.trainer.windows import read_windows

    finished = []
    last_evaluations = {}
    for name, run in runs.items():
        evaluation = final_evaluation(name, run.lines, run.settings["train.steps"])
        last_evaluations[name] = evaluation
        windows = read_windows(run.path, evaluation)
        finished.append(FinishedRun(name, run.settings, float(evaluation["val_loss"]), windows))

    _check_objective({name: run.settings for name, run in runs.items()})
    _check_same(last_evaluations)
    return group_runs(finished)


def _check_objective(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the losses of all runs have the same definition, such as DPO with the same beta and reference."""
    from jaxgpt.post_settings import WITH_REFERENCE

    first, *others = settings
    names = [name for name in settings[first] if name.startswith("post.")]
    if settings[first]["post.objective"] in WITH_REFERENCE and not settings[first]["post.reference"]:
        names.append("init_from")  # the reference is the run of the initial weights
    for other in others:
        for name in names:
            if settings[other][name] != settings[first][name]:
                raise UserError(f"{first} and {other} have different {name}: their losses are not comparable; omit one")


def _check_same(evaluations: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the last evaluations of all runs, lines of metrics.jsonl, are on the same data and windows."""
    first, *others = evaluations
    for name in others:
        for field, what in (("val_data", "validation data or tokenizers"), ("val_windows", "validation windows")):
            if evaluations[name].get(field) != evaluations[first].get(field):
                raise UserError(f"{first} and {name} have different {what}: their losses are not comparable; omit one")


def describe(groups: Sequence[SeedGroup]) -> str:
    """Format a table of groups, and sentences that compare the best group with each of the others."""
    from jaxgpt.study.difference import difference

    rows = [["group", "seeds", "val loss"]]
    for group in groups:
        loss = f"{group.mean:.4f}"
        if math.isfinite(group.stderr):
            loss += f" +- {group.stderr:.4f}"
        rows.append([group.name or "all runs", " ".join(map(str, sorted(group.losses))), loss])
    best, *others = groups
    differences = [difference(best, other) for other in others]
    footnotes = [ERROR_OF_SEEDS]
    if any(map(_has_windows, differences)):
        footnotes.append(ERROR_OF_WINDOWS)
    sentences = [sentence(best, other, found) for other, found in zip(others, differences, strict=True)]
    return "\n".join([columns(rows), *footnotes, *sentences])


def sentence(a: SeedGroup, b: SeedGroup, found: Difference) -> str:
    """Describe the difference between two groups, `difference(a, b)`, in one sentence; `a` has the lower mean loss."""
    # The difference of pairs omits unpaired seeds, so its sign may differ from the order of the means.
    names = (a.name, b.name) if found.mean <= 0 else (b.name, a.name)
    better, worse = names

    size = f"{abs(found.mean):.4f}"
    windows = plural(found.windows, "window")
    if math.isnan(found.stderr):
        if found.windows:
            size += f" +- {found.window_stderr:.4f} over {windows} for these runs"
        unknown = "the error of a group with one seed is unknown"
        return f"{better} and {worse}: not distinguishable, {size}; {unknown}: train at least 3 seeds of each"

    kind = f"{found.pairs} pairs of equal seeds" if found.pairs else "seeds that are not paired"
    if found.windows:
        kind += f", {windows}"
    size += f" +- {found.error:.4f}"
    if found.is_distinguishable:
        low, high = sorted(abs(end) for end in found.interval)
        return f"{better} is better than {worse} by {size} ({kind}, 95% interval {low:.4f} to {high:.4f})"
    return f"{better} and {worse}: not distinguishable, {size} ({kind}); {_advice(found)}"


def _advice(found: Difference) -> str:
    """Return advice on distinguishing two groups."""
    from jaxgpt.study.power import MOST_SEEDS, needs_windows, seeds_needed

    needed = seeds_needed(found)
    if needed is None:
        return "the losses are equal"
    if needs_windows(found):
        return "more seeds alone would not suffice: evaluate on more validation text"
    if needed > MOST_SEEDS:
        return f"more than {MOST_SEEDS:,} seeds would be needed"
    return f"about {needed} seeds would suffice"


def _has_windows(found: Difference) -> bool:
    """Return whether the error of a difference is known, and includes the choice of the windows."""
    return found.windows > 0 and math.isfinite(found.error)


def as_json(groups: Sequence[SeedGroup]) -> dict[str, Any]:
    """Return values for JSON: the groups, and the best group compared with each of the others; unknown numbers are None."""
    from jaxgpt.study.difference import difference

    best, *others = groups
    comparisons = []
    for number, other in enumerate(others, 1):
        comparisons.append({"groups": [0, number], **_difference_json(difference(best, other))})
    return {"groups": [_group_json(group) for group in groups], "comparisons": comparisons}


def _group_json(group: SeedGroup) -> dict[str, Any]:
    """Return a group as values for JSON; its runs, seeds and losses are in the order of the seeds."""
    seeds = sorted(group.losses)
    return {
        "settings": group.settings,
        "runs": [group.runs[seed].name for seed in seeds],
        "seeds": seeds,
        "losses": [group.losses[seed] for seed in seeds],
        "mean": group.mean,
        "stderr": finite_or_none(group.stderr),
    }


def _difference_json(found: Difference) -> dict[str, Any]:
    """Return the difference between two groups as values for JSON."""
    from jaxgpt.study.power import seeds_needed

    return {
        "difference": found.mean,
        "stderr": finite_or_none(found.error),
        "stderr_seeds": finite_or_none(found.stderr),
        "stderr_windows": found.window_stderr if found.windows else None,
        "interval": [finite_or_none(end) for end in found.interval],
        "pairs": found.pairs,
        "windows": found.windows,
        "distinguishable": found.is_distinguishable,
        "seeds_needed": seeds_needed(found),
    }
