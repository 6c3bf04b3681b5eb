"""Compare groups of runs that differ only in their seed.

The losses of a group vary with the seed, so one run per group cannot show whether a setting lowers the loss. With n seeds:

    mean = sum(x) / n,   standard error = sqrt(sum((x - mean)^2) / (n - 1) / n)

Two groups with two or more equal seeds are compared in pairs of runs: the difference of a pair excludes what the seed does to
both runs. Other groups are compared with Welch's t-test. Both use Student's t distribution, and call a difference
distinguishable if its 95% interval excludes 0.

Sources: Student, "The Probable Error of a Mean", 1908; B. L. Welch, "The Generalization of 'Student's' Problem when Several
Different Population Variances are Involved", 1947.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from jaxgpt.errors import UserError
from jaxgpt.trainer.metrics import comparable_evaluations, how_ended

CONFIDENCE = 0.95
POWER = 0.8  # probability that the recommended number of seeds finds the difference
MOST_SEEDS = 1000  # largest number of seeds to recommend
NOT_COMPARED = ("train.seed", "preset")  # settings that may differ within a group


class SeedGroup(NamedTuple):
    """Runs with equal settings except `train.seed`.

    Attributes:
        settings: the settings that differ between the groups.
        losses: the final validation loss of each run in nats per token, keyed by seed.
        runs: name of the run of each seed.
    """

    settings: dict[str, Any]
    losses: dict[int, float]
    runs: dict[int, str]

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


class Difference(NamedTuple):
    """The difference between the mean losses of two groups.

    Attributes:
        mean: mean of the first group minus mean of the second group, over the same seeds if `pairs`.
        stderr: standard error; NaN if a group has a single seed.
        freedom: degrees of freedom of Student's t distribution; NaN if `stderr` is NaN.
        pairs: number of pairs of equal seeds; 0: the groups are compared without pairs.
    """

    mean: float
    stderr: float
    freedom: float
    pairs: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval: mean +- t * stderr, with the quantile t of Student's distribution."""
        half = quantile(0.5 + CONFIDENCE / 2, self.freedom) * self.stderr
        return self.mean - half, self.mean + half

    @property
    def is_distinguishable(self) -> bool:
        """Whether the 95% interval excludes 0; False if the standard error is unknown."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def seeds_needed(self) -> int:
        """Number of seeds per group that would find a difference of this size with probability 0.8; 0: unknown.

        The smallest n with abs(mean) >= (t_0.975 + t_0.8) * deviation / sqrt(n), with n - 1 degrees of freedom in pairs and
        2 (n - 1) without pairs. Numbers above `MOST_SEEDS` are returned as `MOST_SEEDS` + 1.
        """
        if not self.stderr > 0 or not self.mean:
            return 0
        # The deviation of one pair, or the root of the summed variances of one run of each group.
        seeds = self.pairs or self.freedom / 2 + 1
        deviation = self.stderr * math.sqrt(seeds)
        for n in range(2, MOST_SEEDS + 1):
            freedom = n - 1 if self.pairs else 2 * (n - 1)
            needed = quantile(0.5 + CONFIDENCE / 2, freedom) + quantile(POWER, freedom)
            if abs(self.mean) * math.sqrt(n) >= needed * deviation:
                return n
        return MOST_SEEDS + 1


def standard_error(values: Sequence[float]) -> float:
    """Compute the standard error of the mean of values; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def quantile(p: float, freedom: float) -> float:
    """Compute the quantile p of Student's t distribution."""
    return float(stdtrit(freedom, p))


def final_loss(name: str, lines: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Return the last validation loss of a finished run.

    Raises:
        UserError: if the run has no validation loss, or has not finished.
    """
    evaluations = comparable_evaluations(lines)
    if not evaluations:
        raise UserError(f"{name} has no validation loss: train it to an evaluation, or omit it")
    last = evaluations[-1]
    end = lines[-1]["step"] if how_ended(lines, steps) == "finished" else steps  # train.patience may end a run earlier
    if last["step"] != end:
        raise UserError(f"{name} was evaluated last at step {last['step']} of {steps}: resume it, or omit it")
    return float(last["val_loss"])


def group_runs(settings: Mapping[str, Mapping[str, Any]], losses: Mapping[str, float]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, the lowest mean loss first.

    Args:
        settings: the settings of each run, keyed by dotted name (`jaxgpt.config.flat`).
        losses: the final loss of each run.

    Raises:
        UserError: if two runs have equal settings and seeds, so that their losses are not independent.
    """
    compared = {}
    for run, values in settings.items():
        compared[run] = {name: value for name, value in values.items() if name not in NOT_COMPARED}
    first = next(iter(compared.values()))
    differ = [name for name in first if any(values[name] != first[name] for values in compared.values())]

    groups = list[SeedGroup]()
    for run, values in compared.items():
        own = {name: values[name] for name in differ}
        group = next((each for each in groups if each.settings == own), None)
        if group is None:
            group = SeedGroup(own, {}, {})
            groups.append(group)
        seed = settings[run]["train.seed"]
        if seed in group.runs:
            raise UserError(f"{group.runs[seed]} and {run} have equal settings and train.seed {seed}: omit one of them")
        group.losses[seed] = losses[run]
        group.runs[seed] = run
    return sorted(groups, key=lambda group: group.mean)


def difference(a: SeedGroup, b: SeedGroup) -> Difference:
    """Compare the losses of two groups, in pairs if they have two or more equal seeds."""
    common = sorted(a.losses.keys() & b.losses.keys())
    if len(common) > 1:
        pairs = [a.losses[seed] - b.losses[seed] for seed in common]
        return Difference(float(np.mean(pairs)), standard_error(pairs), len(pairs) - 1, len(pairs))

    # Welch's t-test.
    mean = a.mean - b.mean
    square_a = a.stderr**2
    square_b = b.stderr**2
    total = square_a + square_b
    if not total > 0:  # one seed, or equal losses of all seeds
        freedom = math.nan if math.isnan(total) else len(a.losses) + len(b.losses) - 2
        return Difference(mean, math.sqrt(total), freedom, 0)
    freedom = total**2 / (square_a**2 / (len(a.losses) - 1) + square_b**2 / (len(b.losses) - 1))
    return Difference(mean, math.sqrt(total), freedom, 0)


def sentence(a: SeedGroup, b: SeedGroup) -> str:
    """Describe the difference between two groups in one sentence; `a` has the lower mean loss."""
    found = difference(a, b)
    names = (a.name, b.name) if found.mean <= 0 else (b.name, a.name)  # pairs may omit seeds, and change the order
    better, worse = names
    size = f"{abs(found.mean):.4f}"
    if math.isnan(found.stderr):
        unknown = "the error of a group with one seed is unknown"
        return f"{better} and {worse}: not distinguishable, {size}; {unknown}: train at least 3 seeds of each"
    kind = f"{found.pairs} pairs of equal seeds" if found.pairs else "seeds that are not paired"
    low, high = sorted(abs(end) for end in found.interval)
    size += f" +- {found.stderr:.4f}"
    if found.is_distinguishable:
        return f"{better} is better than {worse} by {size} ({kind}, 95% interval {low:.4f} to {high:.4f})"
    needed = found.seeds_needed
    advice = f"about {needed} seeds would tell"
    if needed > MOST_SEEDS:
        advice = f"more than {MOST_SEEDS:,} seeds would be needed"
    elif not needed:
        advice = "the losses are equal"
    return f"{better} and {worse}: not distinguishable, {size} ({kind}); {advice}"
