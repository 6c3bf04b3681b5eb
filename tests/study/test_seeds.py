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

from jaxgpt.cli import compare
from jaxgpt.cli.compare import seed_groups
from jaxgpt.cli.recorded_run import RecordedRun
from jaxgpt.config import PostConfig, flat
from jaxgpt.config_json import to_json
from jaxgpt.errors import UserError
from jaxgpt.study.difference import difference
from jaxgpt.study.power import MOST_SEEDS, seeds_needed
from jaxgpt.study.seeds import FinishedRun, SeedGroup, final_evaluation, group_runs, standard_error
from jaxgpt.trainer.mean_loss import loss_difference, summarize
from jaxgpt.trainer.windows import WindowLosses, read_windows, write_windows

LOSSES = st.lists(st.floats(0.1, 10), min_size=2, max_size=8)


def group(losses: list[float], first: int = 0, name: str = "a") -> SeedGroup:
    seeds = range(first, first + len(losses))
    runs = {seed: FinishedRun(f"{name}{seed}", {}, loss) for seed, loss in zip(seeds, losses, strict=True)}
    return SeedGroup({"x": name}, runs)


def recorded(sums_SW: Any, counts_W: Any, first: int = 0, name: str = "a", windows: str = "same") -> SeedGroup:
    """Return a group of runs with the summed loss of each window."""
    counts_W = np.asarray(counts_W, float)
    losses = [np.sum(sums_W) / counts_W.sum() for sums_W in sums_SW]
    found = group(losses, first, name)
    records = [WindowLosses(windows, np.asarray(sums_W), counts_W) for sums_W in sums_SW]
    for (seed, run), record in zip([*found.runs.items()], records, strict=True):
        found.runs[seed] = run._replace(windows=record)
    return found


def sentence(a: SeedGroup, b: SeedGroup) -> str:
    """Return the sentence of the command about two groups."""
    return compare.sentence(a, b, difference(a, b))


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
    n = seeds_needed(found)
    samples = np.random.default_rng(0).normal(effect, 1, (4000, n))
    power = np.mean(stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05)
    assert 0.75 < power < 0.9


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 40))
def test_the_error_over_seeds_and_windows_equals_the_analysis_of_variance(seed: int, S: int, W: int) -> None:
    """The variance of a mean with two crossed random factors is (MS_seeds + MS_windows - MS_rest) / (S W)."""
    rng = np.random.default_rng(seed)
    d = rng.normal(0.1, 0.1, (S, 1)) + rng.normal(0, 0.1, (1, W)) + rng.normal(0, 0.1, (S, W))
    b = rng.normal(2, 1, (S, W))
    found = difference(recorded(b + d, np.ones(W)), recorded(b, np.ones(W), name="b"))

    total, rows, columns = d.mean(), d.mean(axis=1), d.mean(axis=0)
    seeds = W * sum((row - total) ** 2 for row in rows) / (S - 1)
    windows = S * sum((column - total) ** 2 for column in columns) / (W - 1)
    rest = sum((d[s, w] - rows[s] - columns[w] + total) ** 2 for s in range(S) for w in range(W)) / (S - 1) / (W - 1)
    expected = max(seeds + windows - rest, seeds, windows) / (S * W)
    np.testing.assert_allclose(found.mean, total, rtol=1e-9)
    np.testing.assert_allclose(found.stderr**2, seeds / (S * W), rtol=1e-9)
    np.testing.assert_allclose(found.window_stderr**2, windows / (S * W), rtol=1e-9)
    np.testing.assert_allclose(found.error**2, expected, rtol=1e-9)


@given(st.integers(0, 10**6))
def test_without_an_effect_of_the_windows_the_test_is_that_of_the_seeds(seed: int) -> None:
    """The tests agree even for unequal numbers of tokens, if the loss of each token changes equally."""
    rng = np.random.default_rng(seed)
    counts_W = rng.integers(1, 9, 12)
    b = rng.normal(2, 1, (3, 12)) * counts_W
    a = b + np.array([[0.1], [0.2], [0.25]]) * counts_W
    found = difference(recorded(a, counts_W), recorded(b, counts_W, name="b"))
    expected = stats.ttest_rel([0.1, 0.2, 0.25], [0, 0, 0])
    np.testing.assert_allclose(found.interval, expected.confidence_interval(0.95), rtol=1e-6)
    np.testing.assert_allclose(found.error, found.stderr, rtol=1e-6)


def test_without_an_effect_of_the_seed_the_error_is_that_of_the_windows() -> None:
    rng = np.random.default_rng(0)
    counts_W = rng.integers(1, 9, 50)
    b_W = rng.normal(2, 1, 50) * counts_W
    a_W = b_W + rng.normal(0.1, 0.02, 50) * counts_W
    expected = loss_difference(summarize(b_W, counts_W), summarize(a_W, counts_W))
    found = difference(recorded([a_W] * 3, counts_W), recorded([b_W] * 3, counts_W, name="b"))
    np.testing.assert_allclose((found.mean, found.error), expected, rtol=1e-9)
    single = difference(recorded([a_W], counts_W), recorded([b_W], counts_W, name="b"))
    np.testing.assert_allclose((single.mean, single.window_stderr), expected, rtol=1e-9)
    assert not single.is_distinguishable, "the error over seeds is unknown"


@pytest.mark.parametrize(("of_seeds", "of_windows"), [(0.1, 0.0), (0.0, 1.0), (0.1, 1.0)])
@pytest.mark.parametrize("pairs", [True, False])
def test_the_interval_contains_the_difference_in_95_of_100_experiments(
    of_seeds: float, of_windows: float, pairs: bool
) -> None:
    """Each experiment has other seeds and other windows; the error over seeds alone covers far less."""
    rng = np.random.default_rng(0)
    S, W, n = 4, 60, 800
    covered = []
    for _ in range(n):
        both = rng.normal(3, 0.5, (1, W)) + pairs * rng.normal(0, 0.5, (S, 1))
        a, b = (both + rng.normal(0, 0.2, (S, W)) + rng.normal(0, of_seeds, (S, 1)) for _ in range(2))
        a += rng.normal(0, of_windows, (1, W))  # the true difference is 0
        found = difference(recorded(a, np.ones(W)), recorded(b, np.ones(W), 0 if pairs else 9, "b"))
        low, high = found.interval
        covered.append(low < 0 < high)
    assert 0.92 < np.mean(covered) < 0.99


def test_identical_runs_have_the_difference_0() -> None:
    sums = np.random.default_rng(0).normal(100, 9, (3, 7))
    a, b = recorded(sums, np.ones(7)), recorded(sums.copy(), np.ones(7), name="b")
    found = difference(a, b)
    assert (found.mean, found.error, found.window_stderr) == (0.0, 0.0, 0.0)
    kind = "3 pairs of equal seeds, 7 windows"
    assert sentence(a, b) == f"x a and x b: not distinguishable, 0.0000 +- 0.0000 ({kind}); the losses are equal"


def test_different_windows_are_never_paired() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(100, 9, (2, 3, 7))
    same = recorded(a, np.ones(7))
    other = recorded(b, np.ones(7), name="b", windows="other")
    unknown = group([*other.losses.values()], name="b")
    partly = recorded(b, np.ones(7), name="b")
    partly.runs[2] = partly.runs[2]._replace(windows=None)
    for each in (other, unknown, partly):
        found = difference(same, each)
        assert (found.windows, found.error) == (0, found.stderr)
        assert "window" not in sentence(same, each)


def test_the_sentence_of_one_seed_has_the_error_over_windows() -> None:
    a, b = recorded([[1.0, 2.0, 3.0]], np.ones(3)), recorded([[1.1, 2.3, 3.2]], np.ones(3), name="b")
    assert sentence(a, b).startswith(
        "x a and x b: not distinguishable, 0.2000 +- 0.0577 over 3 windows for these runs; "
    )


def test_more_seeds_do_not_help_if_the_windows_hide_the_difference() -> None:
    effect_W = np.array([0.5, -0.45, 0.3, -0.25])
    b = np.full((3, 4), 2.0)
    a = b + effect_W + np.array([[0.01], [0.0], [-0.01]])
    words = sentence(recorded(b, np.ones(4), name="b"), recorded(a, np.ones(4)))
    assert words.endswith(
        "(3 pairs of equal seeds, 4 windows); more seeds alone would not suffice: evaluate on more validation text"
    )


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
    assert close.endswith(" seeds would suffice")


def test_one_seed_each_cannot_tell() -> None:
    words = sentence(group([1.0]), group([1.2], name="b"))
    unknown = "the error of a group with one seed is unknown: train at least 3 seeds of each"
    assert words == f"x a and x b: not distinguishable, 0.2000; {unknown}"
    assert not difference(group([1.0]), group([1.2], name="b")).is_distinguishable
    assert math.isnan(difference(group([1.0]), group([1.2, 1.3], first=1)).stderr)


def test_runs_are_grouped_by_all_settings_but_the_seed() -> None:
    losses = {(1, 1): 3.0, (1, 2): 3.2, (2, 1): 1.0, (2, 2): 1.2}
    runs = []
    for (lr, seed), loss in losses.items():
        settings = {"lr": lr, "same": 0, "preset": "p", "train.seed": seed}
        runs.append(FinishedRun(f"{lr}-{seed}", settings, loss))
    best, other = group_runs(runs)
    assert best == SeedGroup({"lr": 2}, {1: runs[2], 2: runs[3]})
    assert best.losses == {1: 1.0, 2: 1.2}
    assert (other.settings, other.mean) == ({"lr": 1}, 3.1)
    assert best.name == "lr 2"


def test_the_last_loss_of_an_unfinished_run_is_not_its_final_loss() -> None:
    lines = [{"step": 5, "val_loss": 2.0}, {"step": 7, "ended": "stopped"}]
    with pytest.raises(UserError, match=r"a was evaluated last at step 5 of 10: resume it, or omit it"):
        final_evaluation("a", lines, 10)
    assert final_evaluation("a", [lines[0], {"step": 5, "ended": "finished"}], 10) == lines[0], (
        "it ended by train.patience"
    )
    with pytest.raises(UserError, match=r"a was evaluated last at step 5 of 10"):
        final_evaluation(
            "a", [lines[0], {"step": 10, "ended": "finished"}], 10
        )  # the line of the last evaluation is damaged
    with pytest.raises(UserError, match="a has no validation loss"):
        final_evaluation("a", lines[1:], 10)


def test_the_final_loss_of_an_extended_run_is_its_last_even_if_an_earlier_one_has_more_windows() -> None:
    """The run was extended after the evaluation of the complete split, and ended by `train.patience`."""
    complete = {"step": 4, "val_loss": 2.0, "val_windows": 9}
    last = {"step": 6, "val_loss": 2.1, "val_windows": 3}
    assert final_evaluation("a", [complete, last, {"step": 6, "ended": "finished"}], 10) == last


LINE = {"step": 8, "val_loss": 1.5}


def test_a_record_is_read_for_its_own_evaluation_only(tmp_path: Path) -> None:
    losses = WindowLosses("same", np.array([1.25, 0.1]), np.array([1.0, 2.0]))
    assert read_windows(tmp_path, LINE) is None
    write_windows(tmp_path, 8, 1.5, losses)
    found = read_windows(tmp_path, LINE)
    assert found is not None
    assert (found.windows, [*found.sums_W], [*found.counts_W]) == ("same", [1.25, 0.1], [1.0, 2.0])
    assert read_windows(tmp_path, LINE | {"step": 9}) is None
    assert read_windows(tmp_path, LINE | {"val_loss": 1.6}) is None


@pytest.mark.parametrize(
    "part", ["{", '{"sums": [1]}', '{"sums": ["1"]}', '{"windows": 1}', '{"counts": [0, 0]}'], ids=str
)
def test_a_damaged_record_is_one_line(part: str) -> None:
    write_run("a", 1, 1.0)
    write_run("b", 2, 1.2)
    write_windows(Path("a"), 8, 1.0, WindowLosses("same", np.ones(2), np.ones(2)))
    file = Path("a/evaluation.json")
    file.write_text(part if part == "{" else json.dumps(json.loads(file.read_text()) | json.loads(part)))
    result = jaxgpt("compare", "a", "b")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("jaxgpt: a/evaluation.json is damaged: delete it")
    assert result.err.count("\n") == 1


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
    lines = [evaluated, {"step": 8, "ended": "finished"}]
    runs = {run: RecordedRun(Path(run), values, lines) for run, values in settings.items()}
    if not name:
        assert len(seed_groups(runs)) == 2
        return
    with pytest.raises(UserError, match=f"a and b have different {name}: their losses are not comparable; omit one"):
        seed_groups(runs)


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


def test_the_command_includes_the_error_over_windows() -> None:
    for seed, effect in enumerate((0.1, 0.11, 0.09)):
        write_run(f"low-{seed}", seed, 1.0, 2e-3)
        write_run(f"high-{seed}", seed, 1.0 + effect)
        write_windows(Path(f"low-{seed}"), 8, 1.0, WindowLosses("same", np.array([0.5, 1.5]), np.ones(2)))
        sums_W = np.array([0.5, 1.5]) + effect + [0.03, -0.03]
        write_windows(Path(f"high-{seed}"), 8, 1.0 + effect, WindowLosses("same", sums_W, np.ones(2)))
    names = [f"{kind}-{seed}" for kind in ("high", "low") for seed in range(3)]
    *_, footnote, words = jaxgpt("compare", *names).out.splitlines()
    assert footnote == "+- of a difference is the standard error over seeds and validation windows"
    error = math.hypot(0.01 / math.sqrt(3), 0.03)
    assert words.endswith(f"0.1000 +- {error:.4f} (3 pairs of equal seeds, 2 windows); more seeds alone would not suffice: "
                          "evaluate on more validation text")  # fmt: skip
    [comparison] = jaxgpt("compare", *names, "--json").json["comparisons"]
    found = [comparison[name] for name in ("stderr", "stderr_seeds", "stderr_windows")]
    np.testing.assert_allclose(found, [error, 0.01 / math.sqrt(3), 0.03], rtol=1e-6)
    assert comparison["windows"] == 2


def test_a_run_that_is_given_twice_is_one_line() -> None:
    write_run("a", 1, 1.0)
    result = jaxgpt("compare", "a", "a")
    assert (result.code, result.err) == (2, "jaxgpt: a run is given twice: a a; pass each run once\n")


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

    plotted = jaxgpt("plot", "a", "b")
    assert plotted.code == 0
    note = f"jaxgpt: seeds are not compared: {message}"
    assert plotted.err.startswith(note if other["seed"] == 2 else ""), plotted.err


def test_a_plot_of_seeds_without_losses_has_no_note() -> None:
    """As for runs with rewards, which `compare` does not support."""
    for seed, name in enumerate("ab"):
        write_run(name, seed, 1.0)
        Path(name, "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    plotted = jaxgpt("plot", "a", "b")
    assert (plotted.code, plotted.err) == (0, "")


def test_a_plot_reports_a_damaged_record_of_windows() -> None:
    for seed, name in enumerate("ab"):
        write_run(name, seed, 1.0)
    Path("a/evaluation.json").write_text("{")
    plotted = jaxgpt("plot", "a", "b")
    assert plotted.code == 0
    assert plotted.err.startswith("jaxgpt: seeds are not compared: a/evaluation.json is"), plotted.err
    assert "delete it" in plotted.err
