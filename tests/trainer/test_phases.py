"""The mixture may change when a run is resumed: a batch stays a function of (seed, step), and sources keep their positions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import comparable, jaxgpt, small_run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import Silent, same_bits

from jaxgpt.checkpoint.data import compare_mixture
from jaxgpt.checkpoint.data_record import DataRecord
from jaxgpt.checkpoint.index import checkpoints, resolve_step
from jaxgpt.checkpoint.info import Info, read_info, seal
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, DataConfig
from jaxgpt.data import Batches, Data, Mixture, Tokens, open_data
from jaxgpt.data.mixed_sources import mixed
from jaxgpt.data.mixture import Shares, counts, divide
from jaxgpt.data.packing import pack_documents
from jaxgpt.errors import UserError
from jaxgpt.mix import integer_weights, same_shares
from jaxgpt.report.baselines import read_baselines
from jaxgpt.trainer import loop
from jaxgpt.trainer.loop import Outcome, train
from jaxgpt.trainer.metrics import comparable_evaluations, read_metrics
from jaxgpt.trainer.phases import changed_sources, with_mixtures
from jaxgpt.trainer.run_data import with_data_facts
from jaxgpt.trainer.start import Start

T = 4
NAMES = "abcd"


def tokens(name: str, n: int) -> Tokens:
    """Return a source of n distinct ids."""
    first = 1000 * NAMES.index(name)
    return Tokens([np.arange(first, first + n)], end_ids=(first + 7, first + 16))


def source(name: str, n: int, packed: bool) -> Data:
    ids = tokens(name, n)
    split = pack_documents(ids, T) if packed else Tokens(ids.parts)
    return Data(split, split, True, None, name, f"content of {name}", name)  # type: ignore[arg-type]


def config_of(mix: Sequence[str], **train_settings: Any) -> Config:
    config = Config(data=DataConfig(mix=tuple(mix))).with_model(block_size=T)
    return replace(config, train=replace(config.train, **train_settings))


def checkpoint(config: Config, step: int, rows: int, fingerprints: Sequence[str] | None = None) -> Info:
    """Return a checkpoint after a number of rows; without fingerprints, as version 0.1.0 wrote it."""
    about: dict[str, Any] = {"config": asdict(config)}
    if fingerprints is not None:
        about |= {"data": "", "sources": list(fingerprints)}
    return Info(step, tokens=rows * T, about=about)


@st.composite
def legs(draw: st.DrawFn) -> list[tuple[list[str], int, int]]:
    """Draw the legs of a run: its mixture, number of steps, and batch size."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        mix = [f"{name}={draw(st.integers(1, 9))}" for name in names]
        found.append((mix, draw(st.integers(1, 9)), draw(st.integers(1, 12))))
    return found


@settings(max_examples=60)
@given(legs(), st.integers(0, 2**31 - 1), st.booleans(), st.lists(st.integers(30, 70), min_size=4, max_size=4))
def test_every_window_of_a_source_is_used_once_per_epoch(
    legs: list[tuple[list[str], int, int]], seed: int, packed: bool, sizes: list[int]
) -> None:
    """Sources, weights and batch size change at each resume; sources are removed and added again."""
    parts = {name: source(name, n, packed) for name, n in zip(NAMES, sizes, strict=True)}
    rows = step = 0
    last: Info | None = None
    used: list[tuple[int, ...]] = []  # windows in the order of training
    for mix, steps, batch_size in legs:
        config = with_mixtures(config_of(mix, batch_size=batch_size, seed=seed), last)
        data = mixed(config.data, {each.path: parts[each.path] for each in config.data.sources})
        batches = Batches.of(config, data.train, rows - step * batch_size)
        for _ in range(steps):
            used += map(tuple, batches.at(step)[:].reshape(batch_size, -1).tolist())
            step += 1
        rows += steps * batch_size
        last = checkpoint(config, step, rows)

    whole = Batches.of(replace(config, train=replace(config.train, batch_size=rows)), data.train)
    assert used == [tuple(row) for row in whole.at(0)[:].reshape(rows, -1).tolist()], "a function of (seed, step)"
    for name, part in parts.items():
        own = [window for window in used if window[0] // 1000 == NAMES.index(name)]
        per_epoch = Batches(part.train, T, 1, seed).per_epoch
        for first in range(0, len(own), per_epoch):
            epoch = own[first : first + per_epoch]
            assert len(set(epoch)) == len(epoch)


@settings(max_examples=60)
@given(legs(), st.sampled_from([0.3, 1.0, 2.0, 3.5]), st.booleans())
def test_epochs_are_exact_to_a_batch(legs: list[tuple[list[str], int, int]], epochs: float, packed: bool) -> None:
    """The batch size and the mixture change at each resume; the last leg completes the epochs."""
    parts = {name: source(name, n, packed) for name, n in zip(NAMES, (60, 70, 80, 90), strict=True)}
    rows = step = 0
    last: Info | None = None
    for mix, steps, batch_size in legs:
        config = with_mixtures(config_of(mix, batch_size=batch_size, epochs=epochs).with_model(vocab_size=4000), last)
        data = mixed(config.data, {each.path: parts[each.path] for each in config.data.sources})
        wanted = epochs * Batches.of(config, data.train).per_epoch
        if last is not None and rows >= wanted:
            return
        end = with_data_facts(config, data, last).train.steps
        assert 0 <= rows + (end - step) * batch_size - wanted < batch_size
        taken = min(steps, end - step)
        rows += taken * batch_size
        step += taken
        last = checkpoint(with_data_facts(config, data, last), step, rows)

    if step == end:
        for size in (1, batch_size, 20):
            again = replace(config, train=replace(config.train, batch_size=size))
            assert with_data_facts(again, data, last).train.steps == step, "the epochs are complete with any batch size"


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.integers(0, 5000))
def test_rows_are_counted_without_being_assigned(weights: list[int], n: int) -> None:
    assigned, _ = divide(np.arange(n), weights)
    assert counts(n, weights) == np.bincount(assigned, minlength=len(weights)).tolist()


@given(legs(), st.integers(2, 5))
def test_equal_shares_are_the_same_mixture(legs: list[tuple[list[str], int, int]], factor: int) -> None:
    [weights] = [integer_weights(mix) for mix, *_ in legs[:1]]
    scaled = {name: factor * weight for name, weight in reversed(weights.items())}
    assert same_shares(weights, scaled)
    rows = np.arange(1000)
    for one, other in zip(divide(rows, [*weights.values()]), divide(rows, [*scaled.values()][::-1]), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    ("old", "given", "expected"),
    [
        (["a=1", "b=2"], ["b=4", "a=2"], "a=1 b=2"),
        (["a=1", "b=2"], ["b=1", "c=1"], "a=1 b=2 @80 b=1 c=1"),
        (["a=1", "@40", "b=1"], ["a=1"], "a=1 @40 b=1 @80 a=1"),
        (["a=1", "@40", "b=1"], ["b=3"], "a=1 @40 b=1"),
        (["a=1", "@40", "b=1", "@200", "c=1"], ["b=1"], "a=1 @40 b=1"),
        (["a=1", "@80", "b=1"], ["c=1"], "a=1 @80 c=1"),
        (["a=1"], ["a=1", "@100", "b=1"], "a=1 @100 b=1"),
        (["a=1", "@40", "b=1"], ["a=1", "@40", "b=1"], "a=1 @40 b=1"),
    ],
)
def test_a_new_mixture_begins_at_the_checkpoint(old: list[str], given: list[str], expected: str) -> None:
    """A mixture without @ replaces all later mixtures; a schedule replaces the schedule."""
    last = checkpoint(config_of(old), 5, 20)
    assert " ".join(with_mixtures(config_of(given), last).data.mix) == expected


def test_added_and_removed_sources_are_named() -> None:
    last = checkpoint(config_of(["a=1", "@40", "b=1"]), 5, 20)
    data = with_mixtures(config_of(["a=1", "c=1", "d=1"]), last).data
    assert changed_sources(data, last) == "sources of the new mixture: new c, d; used again a; no longer used b"
    assert changed_sources(config_of(["a=1", "@40", "b=1"]).data, last) == ""


def test_a_path_may_become_a_mixture() -> None:
    last = checkpoint(Config(data=DataConfig(path="a")), 5, 20)
    data = with_mixtures(config_of(["a=1", "b=1"]), last).data
    assert (data.path, " ".join(data.mix)) == ("a", "@80 a=1 b=1")
    assert data.stream_names == {"a": "", "b": " of source 1"}, "the order of windows of a path is kept"
    assert with_mixtures(config_of(["a=1"]), last).data == DataConfig(path="a")


@pytest.mark.parametrize("given", [["b=1", "@40", "b=1", "c=1"], ["a=1", "@39", "b=1"], ["a=1", "@60", "b=1"]])
def test_mixtures_before_the_checkpoint_cannot_change(given: list[str]) -> None:
    last = checkpoint(config_of(["a=1", "@40", "b=1"]), 5, 20)
    message = (
        r"must keep the mixtures up to step 5 \(80 tokens\): a=1 @40 b=1; to change the mixture at this step, pass one"
    )
    with pytest.raises(UserError, match=message):
        with_mixtures(config_of(given), last)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (("a=1", "@5"), "no PATH=WEIGHT after @5"),
        (("a=1", "@5", "b=1", "@5", "c=1"), "ascending numbers of tokens, as in @1000000: '@5'"),
        (("a=1", "@x", "b=1"), "ascending numbers of tokens, as in @1000000: '@x'"),
        (("a=1", "@0", "b=1"), "ascending numbers"),
        (("a=1", "@9", "b=1", "b=2"), "lists b twice"),
    ],
)
def test_schedules_are_checked(mix: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(mix=mix)


def known(old: Sequence[str], given: Sequence[str], fingerprints: Sequence[str], content: dict[str, str]) -> Any:
    """Resume a run with a new mixture of sources with this content; return the schedule and fingerprints, or the change."""
    last = checkpoint(config_of(old), 5, 20, fingerprints)
    config = with_mixtures(config_of(given), last)
    current = list(integer_weights(config.data.phases[-1].words))
    parts = {path: replace(source("a", 30, False), fingerprint=content[path], name=path) for path in current}
    record = DataRecord(Run(Path("run")), last)
    config, data, change = compare_mixture(record, config, mixed(config.data, parts), pytest.fail)
    if change:
        return change
    return " ".join(config.data.mix), data.all_fingerprints


def test_moved_sources_are_recognized_by_their_content() -> None:
    content = {"x/a": "A", "x/b": "B", "c": "C", "b": "B", "copy": "B"}
    assert known(["a=1", "b=2"], ["x/a=1", "x/b=2"], "AB", content) == ("x/a=1 x/b=2", ("A", "B")), "only moved"
    mix, fingerprints = known(["a=1", "b=2"], ["c=1", "x/b=2"], "AB", content)
    assert (mix, fingerprints) == ("a=1 x/b=2 @80 c=1 x/b=2", ("A", "B", "C"))
    mix, fingerprints = known(["a=1", "@40", "b=2"], ["x/a=1"], "AB", content)
    assert (mix, fingerprints) == ("x/a=1 @40 b=2 @80 x/a=1", ("A", "B")), "a source that was removed"
    mix, fingerprints = known(["a=1", "b=2"], ["b=1", "copy=1"], "AB", content)
    assert (mix, fingerprints) == ("a=1 b=2 @80 b=1 copy=1", ("A", "B", "B")), "a copy is a further source"


def test_a_source_with_changed_content_is_named() -> None:
    change = "the data of run has changed since step 5: a"
    assert known(["a=1", "b=2"], ["b=1", "c=1"], "AB", {"b": "X", "c": "C"}) == change
    assert known(["a=1", "@40", "b=2"], ["a=1"], "AB", {"a": "X"}) == change


def test_a_run_does_not_resume_with_a_changed_source() -> None:
    leg("a.txt=1 b.txt=1", 3)
    text = Path("b.txt").read_text()
    config = Run(Path("legs")).config()
    Path("b.txt").write_text(text + "more")
    message = (
        r"the data of legs has changed since step 3: b\.txt; restore it, add the new data as a source of --data\.mix"
    )
    with pytest.raises(UserError, match=message):
        train(Start(config, run=Run(Path("legs"))), Silent())


def write_texts() -> None:
    for number, name in enumerate(NAMES):
        lines = [f"{name} {n} plus {number} is {n + number}.\n" for n in range(120)]
        Path(f"{name}.txt").write_text("".join(lines))


def mixture_run(mix: str, **settings: Any) -> Config:
    write_texts()
    config = small_run(**{"steps": 12, "eval_every": 4} | settings)
    return replace(config, data=DataConfig(mix=tuple(mix.split()), tokenizer="byte"))


def leg(mix: str, stop: int | None, **settings: Any) -> Outcome:
    """Start or resume the run `legs` with a mixture, until a step."""
    config = mixture_run(mix, **settings)
    run = Run(Path("legs"))
    start = Start(replace(config, model=run.config().model), run=run) if run.path.exists() else Start(config, "legs")
    return train(start, Silent(), until=stop)


def test_a_run_with_changed_mixtures_equals_an_uninterrupted_run_bit_for_bit() -> None:
    """Weights change, a source is added, removed and added again, and the data move."""
    leg("a.txt=0.7 b.txt=0.3", 3)
    leg("a.txt=0.2 b.txt=0.5 c.txt=0.3", 5)
    Path("moved").mkdir()
    for name in NAMES:
        Path(f"{name}.txt").rename(f"moved/{name}.txt")
    config = replace(Run(Path("legs")).config(), directory=str(Path("moved").absolute()))
    train(Start(config, run=Run(Path("legs"))), Silent(), until=7)
    leg("a.txt=1 b.txt=1", 9)
    resumed = leg("c.txt=1 b.txt=3", None)

    schedule = Run(Path("legs")).config().data.mix
    assert " ".join(schedule) == (
        "a.txt=0.7 b.txt=0.3 @384 a.txt=0.2 b.txt=0.5 c.txt=0.3 @896 a.txt=1 b.txt=1 @1152 c.txt=1 b.txt=3"
    )
    straight = train(Start(mixture_run(" ".join(schedule)), "straight"), Silent())
    assert same_bits(resumed.state, straight.state)
    losses = [[line["loss"] for line in comparable(run) if "loss" in line] for run in ("legs", "straight")]
    assert losses[0] == losses[1]
    starts = [line for line in read_metrics(Path("legs/metrics.jsonl")) if line.get("changed")]
    assert [(line["step"], line["changed"]["data.mix"][1]) for line in starts] == [
        (3, ["a.txt=0.2", "b.txt=0.5", "c.txt=0.3"]),
        (7, ["a.txt=1", "b.txt=1"]),
        (9, ["c.txt=1", "b.txt=3"]),
    ]


@pytest.mark.ci
def test_a_removed_source_may_be_deleted() -> None:
    leg("a.txt=1 b.txt=1", 3)
    leg("b.txt=1 c.txt=1", 5)
    config = Run(Path("legs")).config()
    Path("a.txt").unlink()
    resumed = train(Start(config, run=Run(Path("legs"))), Silent())
    assert resumed.step == 12
    assert len(read_info(Path("legs/checkpoints/12")).about["sources"]) == 3
    lost = leg("a.txt=1 b.txt=1", None, steps=14)
    assert lost.step == 14, "write_texts restores it"


def test_a_run_of_version_0_1_0_resumes_with_a_new_mixture() -> None:
    """Its checkpoints have one fingerprint of all sources, and its settings have neither a directory nor a schedule."""
    leg("a.txt=1 b.txt=1", 4)
    for step in checkpoints(Path("legs/checkpoints")):
        path = Path("legs/checkpoints", str(step))
        info = read_info(path)
        about = {name: value for name, value in info.about.items() if name != "sources"}
        about["config"] = {name: value for name, value in about["config"].items() if name != "directory"}
        seal(path, replace(info, about=about))
    shutil.copytree("legs", "old")

    resumed = leg("b.txt=1 c.txt=1", None)
    straight = train(Start(mixture_run("a.txt=1 b.txt=1 @512 b.txt=1 c.txt=1"), "straight"), Silent())
    assert same_bits(resumed.state, straight.state)

    shutil.rmtree("legs")
    Path("old").rename("legs")
    Path("a.txt").write_text("changed " * 300)
    config = replace(mixture_run("b.txt=1 c.txt=1"), model=Run(Path("legs")).config().model)
    Path("a.txt").write_text("changed " * 300)
    with pytest.raises(UserError, match="the data of legs has changed since step 4"):
        train(Start(config, run=Run(Path("legs"))), Silent())


def test_losses_on_different_validation_data_are_not_compared() -> None:
    """Weights do not change the validation data; a new source does."""
    leg("a.txt=1 b.txt=1", 4)
    before = checkpoints(Path("legs/checkpoints"))[4]
    seal(Path("legs/checkpoints/4"), replace(before, ranking=0.0, about=before.about | {"best": [0.0, 4]}))
    leg("a.txt=1 b.txt=2", 8)
    assert checkpoints(Path("legs/checkpoints"))[8].about["best"] == [0.0, 4]
    assert resolve_step(Path("legs/checkpoints"), "best") == 4
    leg("a.txt=1 c.txt=2", 12, steps=16)
    infos = checkpoints(Path("legs/checkpoints"))
    assert infos[12].about["best"] == [infos[12].ranking, 12]
    assert resolve_step(Path("legs/checkpoints"), "best") == 12
    assert 4 in infos, "the best of the earlier validation data is kept"


def test_a_changed_mixture_has_its_own_best_loss_and_baselines() -> None:
    """A plot and the n-gram models must not compare losses with those on earlier validation data."""
    small = ["--model.n-layer", "1", "--model.n-embd", "16", "--model.n-head", "2", "--model.block-size", "8"]
    small += [
        "--data.tokenizer",
        "byte",
        "--train.eval-every",
        "2",
        "--train.batch-size",
        "4",
        "--train.sample-tokens",
        "0",
    ]
    Path("easy.txt").write_text("a" * 3000)
    Path("hard.txt").write_text("".join(chr(33 + i * i * 7919 % 90) for i in range(1000)))
    assert jaxgpt("train", "--data.mix", "easy.txt=1", *small, "--train.steps", "4", "--out", "run").code == 0
    easy = read_baselines(Path("run"))["losses"]
    assert jaxgpt("train", "run", "--resume", "--data.mix", "hard.txt=1", "--train.steps", "8").code == 0
    assert jaxgpt("train", "--data.mix", "hard.txt=1", *small, "--train.steps", "2", "--out", "straight").code == 0

    hard = read_baselines(Path("run"))["losses"]
    assert hard == read_baselines(Path("straight"))["losses"] != easy
    lines = list(read_metrics(Path("run/metrics.jsonl")))
    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert min(losses, key=losses.__getitem__) == 4, "the easy text has the lowest loss"
    assert [line["step"] for line in comparable_evaluations(lines)] == [6, 8]
    assert f"{min(losses[6], losses[8]):.4f}" in jaxgpt("plot", "run").out


def test_evaluations_of_version_0_1_0_are_comparable_until_the_mixture_changes() -> None:
    """Version 0.1.0 did not record the validation data of an evaluation."""
    leg("a.txt=1 b.txt=1", 5)
    file = Path("legs/metrics.jsonl")
    lines = [{name: value for name, value in line.items() if name != "val_data"} for line in read_metrics(file)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copytree("legs", "other")
    leg("a.txt=1 b.txt=3", None)
    assert [line["step"] for line in comparable_evaluations(list(read_metrics(file)))] == [4, 8, 12]
    shutil.rmtree("legs")
    Path("other").rename("legs")
    leg("a.txt=1 c.txt=3", None)
    assert [line["step"] for line in comparable_evaluations(list(read_metrics(file)))] == [8, 12]


def test_a_path_becomes_a_mixture_and_keeps_its_position() -> None:
    write_texts()
    config = small_run(steps=8, eval_every=8)
    config = replace(config, data=DataConfig(path="a.txt", tokenizer="byte"))
    train(Start(config, "legs"), Silent(), until=4)
    resumed = leg("a.txt=1 b.txt=1", None, steps=8)
    data = replace(config.data, mix=("@512", "a.txt=1", "b.txt=1"))
    assert Run(Path("legs")).config().data == data
    straight = train(Start(replace(config, data=data), "straight"), Silent())
    assert same_bits(resumed.state, straight.state)
    assert same_bits(resumed.evaluation._replace(seconds=0.0), straight.evaluation._replace(seconds=0.0))


@pytest.mark.ci
def test_epochs_count_windows_not_steps_or_calls() -> None:
    """Accumulation and several steps per call do not change the windows of a run; neither does a resume in between."""
    write_texts()
    config = small_run(steps_per_call=3, accumulation=2, batch_size=6, eval_every=5)
    config = replace(config, data=DataConfig(mix=("a.txt=1", "b.txt=2"), tokenizer="byte"))
    config = replace(config, train=replace(config.train, epochs=1.0))
    train(Start(config, "run"), Silent(), until=4)
    resumed = replace(config, model=Run(Path("run")).config().model, train=replace(config.train, batch_size=4))
    outcome = train(Start(resumed, run=Run(Path("run"))), Silent())
    data = open_data(Run(Path("run")).config())
    windows = read_info(Path("run/checkpoints", str(outcome.step))).tokens // 16
    per_epoch = Batches.of(resumed, data.train).per_epoch
    assert per_epoch <= windows < per_epoch + 4
    assert windows == 4 * 6 + (outcome.step - 4) * 4


@pytest.mark.ci
def test_training_text_of_all_mixtures_is_searched() -> None:
    """`sample --check-memorized` opens the sources that the checkpoint was trained on, including removed ones."""
    leg("a.txt=1 b.txt=1", 4)
    leg("b.txt=1 c.txt=1", 8, steps=8)
    result = jaxgpt("sample", "legs", "--check-memorized", "--max-new-tokens", "3", "--checkpoint", "4", "--json")
    assert result.code == 0, result.err
    assert jaxgpt("sample", "legs", "--check-memorized", "--max-new-tokens", "3", "--checkpoint", "last").code == 0
    assert [each["path"] for each in jaxgpt("data", "report", "legs", "--json").json["sources"]] == ["b.txt", "c.txt"]
    assert jaxgpt("eval", "legs").code == 0
    Path("a.txt").write_text("changed " * 300)
    result = jaxgpt("sample", "legs", "--check-memorized", "--max-new-tokens", "3", "--checkpoint", "last")
    assert "the data of legs has changed since step 8" in result.err
    Path("a.txt").unlink()
    assert jaxgpt("eval", "legs").code == 0, "removed sources are not evaluated"


def test_unopened_sources_are_counted_but_not_read() -> None:
    schedule = [Shares(0, {"x": 1, "y": 1}), Shares(10, {"y": 1})]
    mixture = Mixture({"y": tokens("b", 50)}, schedule)
    source_of, before = mixture.source_of_rows(np.arange(10, 14))
    assert (source_of.tolist(), before.tolist()) == ([0] * 4, [5, 6, 7, 8])
    with pytest.raises(UserError, match="needs a source that is not open"):
        mixture.source_of_rows(np.arange(8, 12))


def test_a_run_that_another_process_has_trained_meanwhile_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is free between the choice of the checkpoint and the first step, while weights and data are read."""
    leg("a.txt=1 b.txt=1", 2)
    config = Run(Path("legs")).config()
    read = loop.read_data
    others: list[int] = []

    def disturbed(*args: Any) -> Any:
        if not others:
            others.append(2)
            train(Start(config, run=Run(Path("legs"))), Silent(), until=4)
        return read(*args)

    monkeypatch.setattr(loop, "read_data", disturbed)
    with pytest.raises(UserError, match="another process has trained legs meanwhile: run the command again"):
        train(Start(config, run=Run(Path("legs"))), Silent())
    assert max(checkpoints(Path("legs/checkpoints"))) == 4
