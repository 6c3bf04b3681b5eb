"""Groups of runs that differ only in their seed; `study/difference.py` compares the losses of two groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.trainer.metrics import evaluations, how_ended
from jaxgpt.trainer.windows import WindowLosses

NOT_COMPARED = ("train.seed", "preset")  # settings that may differ within a group


class SeedGroup(NamedTuple):
    """Runs with equal settings except `train.seed`.

    Attributes:
        settings: the settings that differ between the groups.
        losses: the final validation loss of each run in nats per token, keyed by seed.
        runs: name of the run of each seed.
        windows: loss of each validation window, keyed by seed; runs without such a record are omitted.
    """

    settings: dict[str, Any]
    losses: dict[int, float]
    runs: dict[int, str]
    windows: Mapping[int, WindowLosses] = {}

    @property
    def name(self) -> str:
        """The settings, as in "optim.learning_rate 0.001"."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    @property
    def mean(self) -> float:
        """Mean loss over the seeds."""
        return float(np.mean(list(self.losses.values())))

    @property
    def stderr(self) -> float:
        """Standard error of the mean over the seeds; NaN for one seed."""
        return standard_error(list(self.losses.values()))


def standard_error(values: Sequence[float]) -> float:
    """Compute the standard error of the mean of values; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def final_evaluation(name: str, lines: Sequence[Mapping[str, Any]], steps: int) -> Mapping[str, Any]:
    """Return the line of metrics.jsonl with the last validation loss of a finished run.

    A run that `train.patience` ended has no evaluation of the complete split, unless it was extended after such an evaluation.

    Raises:
        UserError: if the run has no validation loss, or has not finished.
    """
    evaluated = evaluations(lines)
    if not evaluated:
        raise UserError(f"{name} has no validation loss: train it to an evaluation, or omit it")
    last = evaluated[-1]
    # `train.patience` may end a run before `steps`.
    end = lines[-1]["step"] if how_ended(lines, steps) == "finished" else steps
    if last["step"] != end:
        raise UserError(f"{name} was evaluated last at step {last['step']} of {steps}: resume it, or omit it")
    return last


def has_seeds(settings: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether any two runs with these settings differ only in their seed."""
    runs = [(values["train.seed"], _compared(values)) for values in settings]
    return any(
        seed != other_seed and compared == other for (seed, compared), (other_seed, other) in combinations(runs, 2)
    )


def group_runs(
    settings: Mapping[str, Mapping[str, Any]],
    losses: Mapping[str, float],
    windows: Mapping[str, WindowLosses] | None = None,
) -> list[SeedGroup]:
    """Group runs that differ only in their seed, the lowest mean loss first.

    Args:
        settings: the settings of each run, keyed by dotted name (`jaxgpt.config.flat`).
        losses: the final loss of each run.
        windows: the loss of each validation window of the runs that have a record of them.

    Raises:
        UserError: if two runs have equal settings and seeds, so that their losses are not independent.
    """
    compared = {run: _compared(values) for run, values in settings.items()}
    first = next(iter(compared.values()))
    differ = [name for name in first if any(values[name] != first[name] for values in compared.values())]

    own = {run: {name: values[name] for name in differ} for run, values in compared.items()}
    seeds = {run: values["train.seed"] for run, values in settings.items()}
    recorded = windows or {}

    groups = []
    for group_settings in _distinct(own.values()):
        run_of = _runs_by_seed([run for run in own if own[run] == group_settings], seeds)
        group = SeedGroup(
            settings=group_settings,
            losses={seed: losses[run] for seed, run in run_of.items()},
            runs=run_of,
            windows={seed: recorded[run] for seed, run in run_of.items() if run in recorded},
        )
        groups.append(group)
    return sorted(groups, key=lambda group: group.mean)


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are equal within a group."""
    return {name: value for name, value in settings.items() if name not in NOT_COMPARED}


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values without duplicates, in their order."""
    found: list[dict[str, Any]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _runs_by_seed(runs: Sequence[str], seeds: Mapping[str, int]) -> dict[int, str]:
    """Return the runs of a group, keyed by seed; raise `UserError` if two have the same seed."""
    run_of: dict[int, str] = {}
    for run in runs:
        seed = seeds[run]
        if seed in run_of:
            raise UserError(f"{run_of[seed]} and {run} have equal settings and train.seed {seed}: omit one of them")
        run_of[seed] = run
    return run_of
