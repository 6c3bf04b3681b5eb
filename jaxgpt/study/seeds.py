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


class FinishedRun(NamedTuple):
    """A finished run.

    Attributes:
        name: name of the run.
        settings: settings of the run, keyed by dotted name (`jaxgpt.config.flat`).
        loss: final validation loss in nats per token.
        windows: loss of each validation window; None: no record.
    """

    name: str
    settings: Mapping[str, Any]
    loss: float
    windows: WindowLosses | None = None


class SeedGroup(NamedTuple):
    """Runs with equal settings except `NOT_COMPARED`.

    Attributes:
        settings: the settings that differ between the groups.
        runs: the runs, keyed by seed.
    """

    settings: dict[str, Any]
    runs: dict[int, FinishedRun]

    @property
    def losses(self) -> dict[int, float]:
        """Final validation loss of each run in nats per token, keyed by seed."""
        return {seed: run.loss for seed, run in self.runs.items()}

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

    With `train.eval_windows`, a run that `train.patience` ended has no evaluation of the complete split, unless the run was
    extended after such an evaluation.

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


def group_runs(runs: Sequence[FinishedRun]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, the lowest mean loss first; there is at least one run.

    Raises:
        UserError: if two runs have equal settings and seeds, so that their losses are not independent.
    """
    compared = [_compared(run.settings) for run in runs]
    first, *others = compared
    differing = [name for name in first if any(other[name] != first[name] for other in others)]

    groups: list[SeedGroup] = []
    for run in runs:
        settings = {name: run.settings[name] for name in differing}
        group = next((group for group in groups if group.settings == settings), None)
        if group is None:
            group = SeedGroup(settings, {})
            groups.append(group)

        seed = run.settings["train.seed"]
        if seed in group.runs:
            other = group.runs[seed].name
            raise UserError(f"{other} and {run.name} have equal settings and train.seed {seed}: omit one of them")
        group.runs[seed] = run
    return sorted(groups, key=lambda group: group.mean)


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are equal within a group."""
    return {name: value for name, value in settings.items() if name not in NOT_COMPARED}
