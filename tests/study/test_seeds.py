"""Groups of seeds: scipy's tests of the same losses, and the words of the result."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jaxgpt, small_run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxgpt.cli.compare import seed_groups
from jaxgpt.config import PostConfig, flat, to_json
from jaxgpt.errors import UserError
from jaxgpt.study.seeds import MOST_SEEDS, SeedGroup, difference, final_loss, group_runs, sentence, standard_error

LOSSES = st.lists(st.floats(0.1, 10), min_size=2, max_size=8)


def group(losses: list[float], first: int = 0, name: str = "a") -> SeedGroup:
    seeds = range(first, first + len(losses))
    return SeedGroup({"x": name}, dict(zip(seeds, losses, strict=True)), {seed: f"{name}{seed}" for seed in seeds})


@given(LOSSES)
def test_the_standard_error_equals_scipy(losses: list[float]) -> None:
    np.testing.assert_allclose(standard_error(losses), stats.sem(losses), rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10**6), st.integers(2, 9))
def test_pairs_equal_the_paired_t_test(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(2, 1, n)
    b = a + rng.normal(0.1, 0.3, n)
    found = difference(group([*a]), group([*b], name="b"))
    expected = stats.ttest_rel(a, b)
    np.testing.assert_allclose(found.mean / found.stderr, expected.statistic, rtol=1e-9)
    np.testing.assert_allclose(found.interval, expected.confidence_interval(0.95), rtol=1e-9)
    assert (found.freedom, found.pairs) == (n - 1, n)
    assert found.is_distinguishable == (expected.pvalue < 0.05)


@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(2, 9))
def test_different_seeds_equal_the_test_of_welch(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(2, 0.1, n)
    b = rng.normal(2.1, 0.5, m)
    found = difference(group([*a]), group([*b], first=100, name="b"))
    expected = stats.ttest_ind(a, b, equal_var=False)
    np.testing.assert_allclose(found.mean / found.stderr, expected.statistic, rtol=1e-9)
    np.testing.assert_allclose(found.freedom, expected.df, rtol=1e-9)
    np.testing.assert_allclose(found.interval, expected.confidence_interval(0.95), rtol=1e-9)
    assert found.is_distinguishable == (expected.pvalue < 0.05)


def test_pairs_find_a_difference_that_is_smaller_than_the_variation_between_seeds() -> None:
    a = group([1.0, 1.5, 2.0])
    b = group([1.1, 1.61, 2.09], name="b")
    assert difference(a, b).is_distinguishable
    assert not difference(a, group([*b.losses.values()], first=9)).is_distinguishable


@pytest.mark.parametrize("effect", [0.4, 0.7, 1.5])
def test_the_recommended_number_of_seeds_finds_the_difference(effect: float) -> None:
    """Simulate: with that many pairs, about 80% of experiments find a difference of this size."""
    pairs = np.array([-1.0, 1.0, 0.0]) * 1.0
    pairs += effect * pairs.std(ddof=1)
    found = difference(group([*(3 + pairs)]), group([3.0] * 3, name="b"))
    n = found.seeds_needed
    samples = np.random.default_rng(0).normal(effect, 1, (4000, n))
    power = np.mean(stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05)
    assert 0.75 < power < 0.9


def test_the_sentence_of_a_distinguishable_difference() -> None:
    a = group([1.0, 1.5, 2.0])
    b = group([1.1, 1.61, 2.09], name="b")
    assert sentence(a, b) == (
        "x a is better than x b by 0.1000 +- 0.0058 (3 pairs of equal seeds, 95% interval 0.0752 to 0.1248)"
    )


def test_the_sentence_of_a_difference_within_the_error() -> None:
    a = group([1.0, 1.5])
    b = group([1.1, 1.41], first=5, name="b")
    words = sentence(a, b)
    assert words.startswith("x a and x b: not distinguishable, 0.0050 +- 0.2942 (seeds that are not paired); ")
    assert words.endswith(f"more than {MOST_SEEDS:,} seeds would be needed")
    close = sentence(group([1.0, 1.2, 1.1]), group([1.1, 1.25, 1.35], name="b"))
    assert close.startswith("x a and x b: not distinguishable, 0.1333 +- 0.0601 (3 pairs of equal seeds); about ")
    assert close.endswith(" seeds would tell")


def test_one_seed_each_cannot_tell() -> None:
    words = sentence(group([1.0]), group([1.2], name="b"))
    unknown = "the error of a group with one seed is unknown: train at least 3 seeds of each"
    assert words == f"x a and x b: not distinguishable, 0.2000; {unknown}"
    assert not difference(group([1.0]), group([1.2], name="b")).is_distinguishable
    assert math.isnan(difference(group([1.0]), group([1.2, 1.3], first=1)).stderr)


def test_runs_are_grouped_by_all_settings_but_the_seed() -> None:
    settings = {
        f"{lr}-{seed}": {"lr": lr, "same": 0, "preset": "p", "train.seed": seed} for lr in (1, 2) for seed in (1, 2)
    }
    losses = {"1-1": 3.0, "1-2": 3.2, "2-1": 1.0, "2-2": 1.2}
    best, other = group_runs(settings, losses)
    assert best == SeedGroup({"lr": 2}, {1: 1.0, 2: 1.2}, {1: "2-1", 2: "2-2"})
    assert (other.settings, other.mean) == ({"lr": 1}, 3.1)
    assert best.name == "lr 2"


def test_the_last_loss_of_an_unfinished_run_is_not_its_final_loss() -> None:
    lines = [{"step": 5, "val_loss": 2.0}, {"step": 7, "ended": "stopped"}]
    with pytest.raises(UserError, match=r"a was evaluated last at step 5 of 10: resume it, or omit it"):
        final_loss("a", lines, 10)
    assert final_loss("a", [lines[0], {"step": 5, "ended": "finished"}], 10) == 2.0, "it ended by train.patience"
    with pytest.raises(UserError, match=r"a was evaluated last at step 5 of 10"):
        final_loss("a", [lines[0], {"step": 10, "ended": "finished"}], 10)  # the line of the last evaluation is damaged
    with pytest.raises(UserError, match="a has no validation loss"):
        final_loss("a", lines[1:], 10)


def write_run(name: str, seed: int, loss: float, lr: float = 1e-3, **line: Any) -> None:
    Path(name, "checkpoints").mkdir(parents=True)
    Path(name, "tokenizer.json").write_text("{}")
    config = small_run(seed=seed)
    Path(name, "config.json").write_text(to_json(replace(config, optim=replace(config.optim, learning_rate=lr))))
    last = {"step": 8, "val_loss": loss, "val_data": "data", "val_windows": 9} | line
    Path(name, "metrics.jsonl").write_text(json.dumps(last) + '\n{"step": 8, "ended": "finished"}\n')


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (PostConfig(), PostConfig(objective="simpo"), "post.objective"),
        (PostConfig(objective="dpo", beta=0.1), PostConfig(objective="dpo", beta=0.5), "post.beta"),
        (PostConfig(objective="dpo"), PostConfig(objective="dpo"), "init_from"),
        (PostConfig(objective="simpo"), PostConfig(objective="simpo"), ""),
    ],
)
def test_losses_of_different_definitions_are_not_compared(one: PostConfig, other: PostConfig, name: str) -> None:
    """A smaller beta, or a nearer reference, changes the loss of equal weights."""
    evaluated = {"step": 8, "val_loss": 1.0, "val_data": "data", "val_windows": 9}
    config = small_run()
    settings = {
        "a": flat(replace(config, post=one, init_from="base")),
        "b": flat(replace(config, post=other, init_from="different")),
    }
    lines = {run: [evaluated, {"step": 8, "ended": "finished"}] for run in settings}
    if not name:
        assert len(seed_groups(settings, lines)) == 2
        return
    with pytest.raises(UserError, match=f"a and b have different {name}: their losses are not comparable"):
        seed_groups(settings, lines)


def test_the_command_compares_groups() -> None:
    for seed, (low, high) in enumerate([(1.0, 1.1), (1.5, 1.61), (2.0, 2.09)]):
        write_run(f"low-{seed}", seed, low, 2e-3)
        write_run(f"high-{seed}", seed, high)
    names = [f"{kind}-{seed}" for kind in ("high", "low") for seed in range(3)]
    result = jaxgpt("compare", *names)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "group                      seeds          val loss",
        "optim.learning_rate 0.002  0 1 2  1.5000 +- 0.2887",
        "optim.learning_rate 0.001  0 1 2  1.6000 +- 0.2858",
        "+- is the standard error over seeds, on the same validation windows",
        "optim.learning_rate 0.002 is better than optim.learning_rate 0.001 by 0.1000 +- 0.0058 "
        "(3 pairs of equal seeds, 95% interval 0.0752 to 0.1248)",
    ]
    values = jaxgpt("compare", *names, "--json").json
    assert [each["runs"] for each in values["groups"]] == [names[3:], names[:3]]
    [comparison] = values["comparisons"]
    assert (comparison["pairs"], comparison["distinguishable"]) == (3, True)
    plotted = jaxgpt("plot", *names).out
    assert result.out.splitlines()[-1] in plotted.splitlines()


def test_a_run_that_is_given_twice_is_one_line() -> None:
    write_run("a", 1, 1.0)
    result = jaxgpt("compare", "a", "a")
    assert (result.code, result.err) == (2, "jaxgpt: a run is given twice: a a\n")


def test_one_group_has_a_mean() -> None:
    write_run("a", 1, 1.0)
    write_run("b", 2, 1.2)
    assert jaxgpt("compare", "a", "b").out.splitlines()[1] == "all runs    1 2  1.1000 +- 0.1000"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1, "loss": 2.0}, "a and b have equal settings and train.seed 1: omit one of them"),
        (
            {"seed": 2, "loss": 2.0, "val_data": "x"},
            "a and b have different validation data or tokenizers: their losses are",
        ),
        ({"seed": 2, "loss": 2.0, "val_windows": 5}, "a and b have different validation windows: their losses are not"),
        ({"seed": 2, "loss": 2.0, "step": 4}, "b was evaluated last at step 4 of 8: resume it, or omit it"),
    ],
)
def test_runs_that_are_not_comparable_are_one_line(other: dict[str, Any], message: str) -> None:
    write_run("a", 1, 1.0)
    write_run("b", **other)
    if "step" in other:
        Path("b/metrics.jsonl").write_text(Path("b/metrics.jsonl").read_text().replace("finished", "stopped"))
    result = jaxgpt("compare", "a", "b")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert jaxgpt("plot", "a", "b").code in (0, 2)
