"""Compare two groups of runs that differ only in their seed.

The losses of a group vary with the seed, so one run per group cannot show whether a setting lowers the loss. With n seeds:

    mean = sum(x) / n,   standard error = sqrt(sum((x - mean)^2) / (n - 1) / n)

Two groups with two or more equal seeds are compared in pairs of runs: the difference of a pair excludes the effect that the
seed has on both runs. Other groups are compared with Welch's t-test. Both methods use Student's t distribution, and call a
difference distinguishable if its 95% interval excludes 0.

If all runs were evaluated on the same windows, the error also includes the choice of the validation text. The difference
d[s, w] of seed s in window w has a component of the seed, a component of the window, and a remainder:

    variance of the mean = V_seeds + V_windows - V_rest

V_seeds is the variance of the means of the seeds, divided by the number of seeds; V_windows is the variance of the means of
the windows, divided by the number of windows. Both include V_rest, the variance of the remainder, divided by the number
of seeds times the number of windows. These are estimates: if V_rest exceeds V_seeds or V_windows, the sum would be smaller than
the larger variance, which is then used instead.

The interval has the degrees of freedom of the summed variances (Welch and Satterthwaite). `study/power.py` computes the number
of seeds that would find a difference.

Sources: Student, "The Probable Error of a Mean", 1908; B. L. Welch, "The Generalization of 'Student's' Problem when Several
Different Population Variances are Involved", 1947; F. E. Satterthwaite, "An Approximate Distribution of Estimates of Variance
Components", 1946.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from jaxgpt.study.seeds import SeedGroup, standard_error
from jaxgpt.trainer.windows import WindowLosses

CONFIDENCE = 0.95


class Variance(NamedTuple):
    """The variance of a mean, and the degrees of freedom of its estimate."""

    value: float
    freedom: float


class Difference(NamedTuple):
    """The difference between the mean losses of two groups.

    Attributes:
        mean: mean of the first group minus mean of the second group, over the same seeds if `pairs`.
        stderr: standard error over seeds, on the same windows; NaN if a group has a single seed.
        freedom: degrees of freedom of `stderr`; NaN if `stderr` is NaN.
        pairs: number of pairs of equal seeds; 0: the groups are compared without pairs.
        windows: number of validation windows shared by all compared runs; 0: unknown, or the runs have different windows.
        window_stderr: standard error over these windows for the compared models, without the variation between seeds.
        window_variance: variance over the choice of the windows in addition to `stderr` squared: V_windows - V_rest, with
            V_rest at most `stderr` squared; 0 if negative.
    """

    mean: float
    stderr: float
    freedom: float
    pairs: int
    windows: int = 0
    window_stderr: float = 0.0
    window_variance: float = 0.0

    @property
    def error(self) -> float:
        """Standard error over seeds and, if known, windows."""
        return math.sqrt(self.stderr**2 + self.window_variance)

    @property
    def over_windows(self) -> Variance:
        """`window_variance` with its degrees of freedom."""
        return Variance(self.window_variance, self.windows - 1)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval: mean +- t * error, with the quantile t of Student's distribution."""
        over_seeds = Variance(self.stderr**2, self.freedom)
        freedom = joint_freedom([over_seeds, self.over_windows], if_zero=self.freedom)
        half = quantile(0.5 + CONFIDENCE / 2, freedom) * self.error
        return self.mean - half, self.mean + half

    @property
    def is_distinguishable(self) -> bool:
        """Whether the 95% interval excludes 0; False if the standard error is unknown."""
        low, high = self.interval
        return low > 0 or high < 0


def quantile(p: float, freedom: float) -> float:
    """Compute the quantile p of Student's t distribution."""
    return float(stdtrit(freedom, p))


def difference(a: SeedGroup, b: SeedGroup) -> Difference:
    """Compare the losses of two groups, in pairs if they have two or more equal seeds.

    The error includes the choice of the windows if all compared runs were evaluated on the same windows.
    """
    common = sorted(a.losses.keys() & b.losses.keys())
    if len(common) > 1:
        found = _paired(a, b, common)
        a_windows = _windows_of(a, common)
        b_windows = _windows_of(b, common)
    else:
        found = _welch(a, b)
        a_windows = _windows_of(a, sorted(a.losses))
        b_windows = _windows_of(b, sorted(b.losses))

    are_known = bool(a_windows) and bool(b_windows)
    fingerprints = {losses.windows for losses in (*a_windows, *b_windows)}
    if not are_known or len(fingerprints) > 1:
        return found
    if len(a_windows[0].sums_W) == 1:  # the variance over one window is unknown
        return found

    # Stack the losses [S, W] of each group, or the differences of the pairs.
    a_SW = np.stack([losses.means for losses in a_windows])
    b_SW = np.stack([losses.means for losses in b_windows])
    parts = [a_SW - b_SW] if found.pairs else [a_SW, -b_SW]
    return _with_window_error(found, parts, a_windows[0].shares)


def _windows_of(group: SeedGroup, seeds: Sequence[int]) -> list[WindowLosses]:
    """Return the losses of the windows of each seed; [] unless all are known."""
    found = []
    for seed in seeds:
        windows = group.runs[seed].windows
        if windows is None:
            return []
        found.append(windows)
    return found


def _paired(a: SeedGroup, b: SeedGroup, seeds: Sequence[int]) -> Difference:
    """Compare the losses of two groups in pairs of equal seeds."""
    pairs = [a.losses[seed] - b.losses[seed] for seed in seeds]
    return Difference(
        mean=float(np.mean(pairs)),
        stderr=standard_error(pairs),
        freedom=len(pairs) - 1,
        pairs=len(pairs),
    )


def _welch(a: SeedGroup, b: SeedGroup) -> Difference:
    """Compare the mean losses of two groups with Welch's t-test."""
    mean = a.mean - b.mean
    of_a = Variance(a.stderr**2, len(a.losses) - 1)
    of_b = Variance(b.stderr**2, len(b.losses) - 1)
    total = of_a.value + of_b.value
    if math.isnan(total):  # a group with one seed
        return Difference(mean, stderr=math.nan, freedom=math.nan, pairs=0)
    freedom = joint_freedom([of_a, of_b], if_zero=of_a.freedom + of_b.freedom)
    return Difference(mean, math.sqrt(total), freedom, pairs=0)


def _with_window_error(found: Difference, parts: Sequence[np.ndarray], shares_W: np.ndarray) -> Difference:
    """Add the error over windows to a difference.

    Args:
        found: the difference.
        parts: losses `[S, W]` of the pairs or of both groups; their means add up to the difference.
        shares_W: number of tokens of each window, divided by the mean of these numbers.
    """
    W = len(shares_W)

    # Compute the effect of the windows that all seeds share, without the effect of their numbers of tokens.
    windows_W = np.zeros(W)
    variance_of_rest = 0.0
    for part_SW in parts:
        seeds_S1 = part_SW.mean(axis=1, keepdims=True)
        part_W = part_SW.mean(axis=0) - seeds_S1.mean() * shares_W
        windows_W += part_W
        S = len(part_SW)
        if S > 1:
            rest_SW = part_SW - seeds_S1 * shares_W - part_W
            variance_of_rest += float((rest_SW**2).sum()) / ((S - 1) * (W - 1)) / (S * W)

    of_windows = float((windows_W**2).sum()) / (W - 1) / W
    extra = 0.0
    if not math.isnan(found.stderr):
        # The total is at least the variance over windows alone: the losses of few seeds may be close by chance.
        extra = max(of_windows - min(variance_of_rest, found.stderr**2), 0.0)
    return found._replace(windows=W, window_stderr=math.sqrt(of_windows), window_variance=extra)


def joint_freedom(variances: Sequence[Variance], if_zero: float) -> float:
    """Compute the degrees of freedom of a sum of variances; `if_zero` if the sum is 0 or unknown.

    The formula of Welch and Satterthwaite, for variances v with f degrees of freedom: `sum(v)^2 / sum(v^2 / f)`.
    """
    total = sum(variance.value for variance in variances)
    if not total > 0:
        return if_zero
    # Divide by the total first, so that the squares of small variances are not rounded to 0.
    shares = [(variance.value / total, variance.freedom) for variance in variances if variance.value > 0]
    return 1 / sum(share**2 / freedom for share, freedom in shares)
