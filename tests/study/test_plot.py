"""Figures: numbers, labels and sizes match the arrays, and no text makes matplotlib warn or fail."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from folders import SMALL, run_folder
from helpers import jaxgpt

import jaxgpt.cli.plot as plot_command
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.draw import Axis, draw_run
from jaxgpt.cli.plot_table import table
from jaxgpt.cli.recorded_run import RecordedRun
from jaxgpt.errors import UserError
from jaxgpt.study import plot, run_axis
from jaxgpt.study.drawn_runs import setting_label
from jaxgpt.study.figure import TOKEN_CHARACTERS
from jaxgpt.study.run_axis import AXES

ODD = [
    "The",
    " the",
    "\n",
    "$x^$",
    "\U0001f600",
    "שלום",
    "\x07",
    "日本",
    "\\",
    "\ud800",
    "",
    "a" * 40,
    "\u202e",
    "_{",
    "\0",
]
LINES = [{"step": s, "loss": 4.0 - s / 10, "tokens": 8 * (s + 1), "elapsed_seconds": 2.0 * (s + 1)} for s in range(10)]
LINES += [{"step": 5, "val_loss": 3.5}, {"step": 10, "val_loss": 3.1}]


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_attention_of_a_head_has_a_label_for_each_token() -> None:
    n = len(ODD)
    pattern = np.tril(np.random.default_rng(0).random((n, n)))
    figure = plot.attention(pattern, ODD, title="$layer_{0$")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert np.array_equal(axes.images[0].get_array(), pattern)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[:4] == ["The", "·the", "↵", "$x^$"]
    assert labels[6] == "\\x07"
    assert len(labels) == n == len(axes.get_yticklabels())
    assert max(map(len, labels)) <= TOKEN_CHARACTERS
    rows = plot.attention(pattern[-3:], ODD).axes[0].get_yticklabels()
    assert [row.get_text() for row in rows] == labels[-3:], "the queries are the last tokens"


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_attention_of_a_layer_has_a_picture_for_each_head(heads: int) -> None:
    figure = plot.attention(np.full((heads, 5, 5), 0.2))
    figure.draw_without_rendering()
    assert sum(len(axes.images) for axes in figure.axes if axes.get_title().startswith("head")) == heads


def test_the_lens_writes_a_word_into_each_cell() -> None:
    n = len(ODD)
    figure = plot.lens(np.linspace(0, 1, 2 * n).reshape(2, n), ODD, [ODD, ODD[::-1]], title="$out_{$")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert len(axes.texts) == 2 * n
    assert (axes.texts[0].get_text(), axes.texts[0].get_position()) == ("The", (0, 0))
    assert (axes.texts[0].get_color(), axes.texts[-1].get_color()) == ("#111827", "white"), "readable on its cell"
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first layer is at the top"


def test_patching_is_symmetric_around_zero() -> None:
    figure = plot.patching([[0.5, -2.0], [np.nan, 0.0]], ["a", "b"])
    assert figure.axes[0].images[0].get_clim() == (-2, 2)
    assert plot.patching(np.zeros((2, 2)), ["a", "b"]).axes[0].images[0].get_clim() == (-1, 1)
    crowded = plot.patching(np.ones((3, 300)), ["word"] * 300)
    assert len(crowded.axes[0].get_xticklabels()) < 200, "labels that fit"


def test_labels_of_mixtures_are_short() -> None:
    assert setting_label(["a=1", "b=0.5"]) == "a=1 b=0.5"
    assert setting_label(("path/to/a=1",) * 9) == "path/to/a=1 path/to/a=1 path/to/a=1 pat\N{HORIZONTAL ELLIPSIS}"


def test_the_command_and_python_have_the_same_axes() -> None:
    assert get_args(Axis) == get_args(run_axis.Axis) == ("all", *AXES)


def test_losses_against_steps_tokens_and_time() -> None:
    """A validation loss after 5 steps is at the tokens and the time of the fifth step."""
    figure = plot.losses({"a $run^$": LINES, "\U0001f600": LINES[:10]}, baselines={"$x^$": 4.2}, title="日本 $_$")
    figure.draw_without_rendering()
    for axes, place in zip(figure.axes, (5, 40, 10 / 1), strict=True):
        curves = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
        assert [curve.get_xdata()[0] for curve in curves] == [place]
        assert curves[0].get_ydata().tolist() == [3.5, 3.1]
        assert any(set(line.get_ydata()) == {4.2} for line in axes.lines)
    kinds = ["training (single batch)", "validation"]
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["a $run^$", "\N{GRINNING FACE}", *kinds]
    curves = figure.axes[0].lines[:2]  # training and validation of the first run
    for line, entry in zip(curves, legend.get_lines()[-2:], strict=True):
        assert (line.get_marker(), line.get_alpha()) == (entry.get_marker(), entry.get_alpha())
    alone = plot.losses({"a": LINES[:10]}).legends[0].get_texts()
    assert [text.get_text() for text in alone] == ["a"], "no validation losses to tell apart"
    names = plot.losses({"_a": LINES, "_b": LINES[:10], "__": LINES}).legends[0].get_texts()
    assert [text.get_text() for text in names] == ["_a", "_b", "__", *kinds]
    hours = plot.losses(
        {"a": [line | {"elapsed_seconds": 3600.0 * (line["step"] + 1)} for line in LINES[:10]]}, "seconds"
    )
    assert hours.axes[0].get_xlabel() == "time (hours)"
    assert hours.axes[0].lines[0].get_xdata().tolist() == list(range(10))


def test_experts_have_panels_with_the_range_of_their_layers() -> None:
    lines = [line | {"load_entropy": [0.9, 0.5 + line["step"] / 20], "balance_loss": 1.5} for line in LINES[:10]]
    figure = plot.losses({"experts": lines, "dense": LINES}, "step")
    figure.draw_without_rendering()
    panels = {axes.get_ylabel(): axes for axes in figure.axes if axes.get_ylabel()}
    losses, entropy, balance = panels
    assert losses == "loss (nats per token)"
    [line] = panels[entropy].lines
    assert line.get_ydata()[0] == pytest.approx(0.7), "the mean of the layers"
    [area] = panels[entropy].collections
    low, high = area.get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((0.5, 0.95))
    assert not panels[balance].collections
    assert len(plot.losses({"dense": LINES}, "step").axes) == 1


def test_changed_settings_are_numbered_and_explained_in_the_legend() -> None:
    first = {"step": 5, "changed": {"optim.learning_rate": [0.1, 0.01], "train.steps": [9, 10]}}
    second = {"step": 7, "changed": {"train.batch_size": [8, 4]}}
    figure = plot.losses({"a": [*LINES, first, {"step": 6, "changed": {}}, second]})
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts if text.get_text().isdigit()] == ["1", "2"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-2:] == ["1: step 5, learning_rate 0.01, steps 10", "2: step 7, batch_size 4"]


# A run with train.eval_windows: five windows, and all windows at the last step.
PARTIAL = [
    {"step": 250, "val_loss": 1.2, "val_windows": 5},
    {"step": 500, "val_loss": 1.1, "val_windows": 5},
    {"step": 750, "val_loss": 1.45, "val_windows": 100},
]


def test_evaluations_on_fewer_windows_are_a_separate_curve() -> None:
    figure = plot.losses({"a": PARTIAL}, "step")
    [axes] = figure.axes
    curves = {line.get_marker(): line for line in axes.lines if len(line.get_xdata())}
    assert curves["o"].get_xdata().tolist() == [250, 500]
    assert (curves["D"].get_xdata().tolist(), curves["D"].get_linestyle()) == ([750], "None")
    assert [text.get_text() for text in axes.texts] == ["1.450"]
    assert figure.legends[0].get_texts()[-1].get_text() == "validation, comparable"


REWARDS = [
    {
        "step": step,
        "loss": 0.0,
        "reward": step / 200,
        "answer_tokens": 3.0,
        "entropy": 1.0,
        "elapsed_seconds": step + 1.0,
    }
    for step in range(200)
]
REWARDS += [{"step": 200, "val_reward": 0.5, "val_reward_stderr": 0.125, "val_answer_tokens": 2.0}]


def test_rewards_have_a_panel_for_each_metric() -> None:
    """A point is the median of four steps; a panel without values is omitted, as KL here in one of two runs."""
    one = plot.rewards({"a": REWARDS})
    assert [axes.get_ylabel() for axes in one.axes] == ["reward", "tokens per answer", "entropy (nats per token)"]
    steps, medians = one.axes[0].lines[0].get_data()
    np.testing.assert_allclose(medians, np.asarray(steps) / 200)
    assert len(steps) == 50
    bars = one.axes[0].collections[0].get_segments()[0]
    assert bars.tolist() == [[200, 0.375], [200, 0.625]], "the held-out reward and its standard error"

    change = {"step": 100, "changed": {"optim.learning_rate": [0.1, 0.01]}}
    line = {"step": 0, "reward": 0.5, "kl": 0.25, "elapsed_seconds": 7200.0}
    two = plot.rewards({"a": [*REWARDS, change], "$b^$": [line]}, "seconds", title="$_$")
    two.draw_without_rendering()
    assert [axes.get_xlabel() for axes in two.axes] == ["time (minutes)"] * 4
    points = [(*line.get_xdata(), *line.get_ydata()) for line in two.axes[3].lines if len(line.get_xdata()) == 1]
    assert points == [(0, 0.25)]
    legend = [text.get_text() for text in two.legends[0].get_texts()]
    kinds = ["sampled answers", "most probable answers to held-out prompts"]
    assert legend == ["a", "$b^$", *kinds, "1: step 100, learning_rate 0.01"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.losses({"x": [{"step": 1}]}), "x has no losses"),
        (lambda: plot.losses({}), "no runs to draw"),
        (lambda: plot.rewards({}), "no runs to draw"),
        (lambda: plot.rewards({"x": LINES}), "x has no rewards"),
        (lambda: plot.rewards({"x": REWARDS}, "stpe"), "no axis 'stpe'"),
        (lambda: plot.lens(np.ones((2, 3)), ["a"]), r"expected an array of shape \[2, 1\] for these labels"),
        (
            lambda: plot.losses({"x": LINES}, "stpe"),
            r"no axis 'stpe' \(did you mean step\?\): choose from all, step, tokens",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_rejected(draw: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw()


def recorded(settings: dict[str, Any], metrics: dict[str, Any]) -> dict[str, RecordedRun]:
    return {name: RecordedRun(Path(name), settings[name], lines) for name, lines in metrics.items()}


def test_the_table_of_runs_shows_what_differs() -> None:
    """The best run is first; a run without evaluations is last."""
    faster = [{"step": 7, "val_loss": 2.5}, {"step": 9, "val_loss": 2.75, "tokens_per_second": 1234.0}]
    metrics = {"none": LINES[:10], "a": LINES, "b": faster}
    settings = {name: {"same": 1, "optim.learning_rate": i / 10} for i, name in enumerate(metrics)}
    none = dict.fromkeys(metrics, 0.0)
    head, *rows = (line.split() for line in table(recorded(settings, metrics), none).splitlines())
    assert head == ["run", "val", "loss", "step", "tokens/s", "optim.learning_rate"]
    assert rows == [["b", "2.5000", "7", "1,234", "0.2"], ["a", "3.1000", "10", "0.1"], ["none", "0.0"]]
    head, *rows = (line.split() for line in table(recorded(settings, metrics), none | {"a": 4.0}).splitlines())
    assert head[3:5] == ["bits/byte", "step"]
    assert rows[1] == ["a", "3.1000", f"{3.1 / np.log(2) / 4:.4f}", "10", "0.1"]
    many = {name: {f"s{i}": name for i in range(9)} for name in metrics}
    assert table(recorded(many, metrics), none).splitlines()[-1] == "further settings that differ: s6, s7, s8"


def test_the_table_compares_losses_on_the_most_windows_only() -> None:
    whole = [{"step": step, "val_loss": loss, "val_windows": 100} for step, loss in ((250, 1.5), (500, 1.4))]
    settings = {name: {"same": 1} for name in ("partial", "whole")}
    unknown = dict.fromkeys(settings, 0.0)
    metrics = {"partial": PARTIAL, "whole": whole}
    rows = [line.split() for line in table(recorded(settings, metrics), unknown).splitlines()]
    assert rows == [["run", "val", "loss", "step"], ["whole", "1.4000", "500"], ["partial", "1.4500", "750"]]
    stopped = {"partial": PARTIAL[:2], "whole": whole}
    rows = [line.split() for line in table(recorded(settings, stopped), unknown).splitlines()]
    assert rows[0] == ["run", "val", "loss", "windows", "step"]
    assert rows[1] == ["partial", "1.1000", "5", "500"]


def test_the_command_draws_runs() -> None:
    for name in ("a", "b $^"):
        run_folder(Path(name), SMALL)
        Path(name, "metrics.jsonl").write_text("\n".join(map(json.dumps, LINES)) + '\n{"step": 3, "lo')
        Path(name, "baselines.json").write_text('{"losses": {"uniform": 4.2}}')
    for out, first in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.PDF", b"%PDF")):
        result = jaxgpt("plot", "a", "b $^", "--out", out)
        assert (result.code, result.out.splitlines()[-1]) == (0, f"wrote {out}: 2 runs"), result.err
        assert Path(out).read_bytes().startswith(first)
    Path("a/baselines.json").write_text('{"losses": {"uniform": 4.3}}')
    assert "baselines omitted" in jaxgpt("plot", "a", "b $^", "--x", "step").err
    result = jaxgpt("plot", "b $^", "--out", "no/x.png")
    assert (result.code, result.err) == (2, "jaxgpt: cannot write no/x.png: No such file or directory\n")


def test_the_command_draws_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are drawn if all runs have rewards; otherwise, losses."""
    drawn: list[str] = []
    monkeypatch.setattr("jaxgpt.study.figure.save", lambda figure, path: drawn.append(figure.axes[0].get_ylabel()))
    for name, lines in (("a", REWARDS), ("b", LINES)):
        run_folder(Path(name), SMALL)
        Path(name, "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert jaxgpt("plot", "a", "--x", "seconds").code == 0
    assert jaxgpt("plot", "a", "b").code == 0
    for name in "ab":
        draw_run(Run(Path(name)), name)
    assert drawn == ["reward", "loss (nats per token)", "reward", "loss (nats per token)"]


def test_follow_draws_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look finds no metrics yet; every later look finds a new line."""
    run_folder(Path("a"), SMALL)
    drawn: list[int] = []
    texts = iter(["", *(json.dumps({"step": step, "loss": 3.0 - step}) for step in range(3))])

    def still_trains(run: Any, lines: list[Any]) -> bool:
        text = next(texts, None)
        if text:
            with Path("a/metrics.jsonl").open("a") as file:
                file.write(text + "\n")
        return text is not None

    draw = plot_command.draw

    def counted(lines: Any, *rest: Any) -> None:
        drawn.append(len(lines["a"]))
        draw(lines, *rest)

    monkeypatch.setattr(plot_command, "still_trains", still_trains)
    monkeypatch.setattr(plot_command, "draw", counted)
    monkeypatch.setattr(plot_command, "EVERY", 0.0)
    result = jaxgpt("plot", "a", "--follow")
    assert result.code == 0, result
    assert drawn == [1, 2, 3]
    assert result.err.splitlines()[0] == "jaxgpt: drawing losses.png every 0 seconds while a trains"
    assert result.out.splitlines()[-1] == "wrote losses.png: 1 run"
