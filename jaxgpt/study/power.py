"""Power: the number of seeds that would find a difference between two groups of runs."""

from __future__ import annotations

import math

from jaxgpt.study.difference import CONFIDENCE, Difference, Variance, joint_freedom, quantile

POWER = 0.8  # probability that the recommended number of seeds finds the difference
MOST_SEEDS = 1000  # largest number of seeds to recommend


def seeds_needed(found: Difference) -> int | None:
    """Return the number of seeds per group that would find a difference of this size with probability 0.8.

    The number is None if the error is unknown or 0, or if the difference is 0. Otherwise, it is the smallest n with
    `abs(mean) >= (t_0.975 + t_0.8) * sqrt(variance / n + window_variance)`. In pairs, `variance` is the variance of a pair's
    difference, with n - 1 degrees of freedom; without pairs, the summed variances of one run of each group, with 2 (n - 1). The
    quantiles t have the degrees of freedom of the sum (`joint_freedom`).

    Numbers above `MOST_SEEDS` are returned as `MOST_SEEDS` + 1.
    """
    if math.isnan(found.error) or found.error == 0 or found.mean == 0:
        return None
    for n in range(2, MOST_SEEDS + 1):
        if abs(found.mean) >= _smallest(_over_seeds(found, n), found.over_windows):
            return n
    return MOST_SEEDS + 1


def needs_windows(found: Difference) -> bool:
    """Return whether the choice of the windows hides a difference of this size, regardless of the number of seeds."""
    no_variance = Variance(0.0, freedom=1)  # variance over seeds in the limit of many seeds
    return abs(found.mean) < _smallest(no_variance, found.over_windows)


def _over_seeds(found: Difference, n: int) -> Variance:
    """Return the variance of a difference over seeds if the experiment is repeated with n seeds per group."""
    if found.pairs:
        return Variance(found.stderr**2 * found.pairs / n, n - 1)
    # Groups of different sizes count as two groups of the size with the same degrees of freedom, 2 (size - 1).
    size = found.freedom / 2 + 1
    return Variance(found.stderr**2 * size / n, 2 * (n - 1))


def _smallest(over_seeds: Variance, over_windows: Variance) -> float:
    """Return the smallest difference that is found with probability `POWER`."""
    freedom = joint_freedom([over_seeds, over_windows], if_zero=over_seeds.freedom)
    t_of_interval = quantile(0.5 + CONFIDENCE / 2, freedom)
    t_of_power = quantile(POWER, freedom)
    return (t_of_interval + t_of_power) * math.sqrt(over_seeds.value + over_windows.value)
