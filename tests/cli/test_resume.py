"""`jaxgpt train --resume`: messages, errors, and resuming after a kill at any time."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers import TEXT, Result, comparable, flags, jaxgpt

from jaxgpt.checkpoint import saver
from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import Info, read_info, seal
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.introduction import data_lines
from jaxgpt.data import Batches, open_data
from jaxgpt.directories import NEW, REPLACED
from jaxgpt.locks import LOCK
from jaxgpt.trainer.finished import why_finished
from jaxgpt.trainer.metrics import read_metrics
from jaxgpt.trainer.run_data import with_data_facts

TINY = flags(
    data__path="text.txt",
    model__n_layer=1,
    model__norm="none",
    model__mlp="none",
    model__n_embd=16,
    model__n_head=2,
    model__block_size=16,
    model__dropout=0.2,
    optim__name="adamw",
    train__steps=4,
    train__batch_size=4,
    train__eval_every=2,
    train__log_every=1,
    train__sample_tokens=0,
    mesh__data=1,
)
START = ["train", "shakespeare", *TINY]


def resume(out: str, *changes: str) -> Result:
    return jaxgpt("train", "--resume", "--out", out, *changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps; do not modify."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    result = jaxgpt(*START, "--data.path", str(folder / "text.txt"), "--out", str(folder / "run"))
    assert result.code == 0, result.err
    return folder / "run"


@pytest.fixture
def run(finished: Path) -> Path:
    """A copy of the finished run."""
    shutil.copytree(finished, "run")
    return Path("run")


def test_the_step_and_every_changed_setting_are_printed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run / "checkpoints/4")
    read = list[int]()
    at = Batches.at
    monkeypatch.setattr(
        Batches, "at", lambda self, step: read.append(self.first + step * self.batch_size) or at(self, step)
    )
    result = resume("run", "--train.steps", "6", "--train.batch-size", "8", "--optim.learning-rate", "0.003")
    assert result.code == 0, result.err
    where, what = result.err.splitlines()
    assert where == "jaxgpt: resuming from run/checkpoints/2 at step 2/6"
    assert what == (
        "jaxgpt: changed settings: optim.learning_rate 0.004 -> 0.003, train.steps 4 -> 6, train.batch_size 4 -> 8"
    )
    first, second = (line for line in read_metrics(run / "metrics.jsonl") if "started" in line)
    assert (first["step"], first["changed"], second["step"]) == (0, {}, 2)
    assert {"command", "directory", "host", "commit", "devices", "versions"} <= second.keys()
    assert second["changed"] == {
        "optim.learning_rate": [0.004, 0.003], "train.steps": [4, 6], "train.batch_size": [4, 8]
    }  # fmt: skip
    tokens = {line["step"]: line["tokens"] for line in comparable(run) if "loss" in line}
    assert tokens == {0: 64, 1: 128, 2: 256, 3: 384, 4: 512, 5: 640}
    assert read_info(run / "checkpoints/6").tokens == 640
    assert read == [8, 16, 24, 32]  # after the 8 windows of the first two steps


def test_epochs_set_the_steps(run: Path) -> None:
    old = Run(run).config()
    data = open_data(old)
    windows = Batches.of(old, data.train).per_epoch
    train = with_data_facts(replace(old, train=replace(old.train, epochs=1.5)), data).train
    assert (train.steps, train.epochs) == (math.ceil(1.5 * windows / old.train.batch_size), 0)
    larger = replace(old, train=replace(old.train, epochs=1.5, batch_size=8))  # after 4 steps of 4 windows
    assert with_data_facts(larger, data, read_info(run / "checkpoints/4")).train.steps == 4 + math.ceil(
        (1.5 * windows - 16) / 8
    )
    result = resume("run", "--train.epochs", "1e-9")
    assert result.code == 2
    assert f"train.epochs 1e-09 does not exceed the {16 / windows:.3g} epochs up to the current step 4" in result.err
    assert "omit one of them" in resume("run", "--train.epochs", "1", "--train.steps", "9").err


def test_other_files_in_the_directory_of_a_new_run_are_named_and_kept(finished: Path) -> None:
    Path("run").mkdir()
    for name in ("notes.txt", ".hidden", "metrics.jsonl"):
        Path("run", name).write_text("")
    result = jaxgpt(*START, "--data.path", str(finished.parent / "text.txt"), "--out", "run", "--train.steps", "1")
    assert result.code == 0, result.err
    assert result.err == "jaxgpt: keeping the files in run that are not part of a run: notes.txt\n"
    assert Path("run/notes.txt").exists()


def test_info_is_the_state_of_a_run(run: Path) -> None:
    state = jaxgpt("info", "run", "--json").json["run"]
    assert (state["preset"], state["step"], state["steps"], state["tokens"]) == ("shakespeare", 4, 4, 256)
    assert [each["step"] for each in state["checkpoints"]] == [2, 4]
    losses = {each["step"]: each["val_loss"] for each in state["checkpoints"]}
    assert state["best"] == min(losses, key=losses.__getitem__)
    assert state["data"].endswith("text.txt")
    assert state["changed"]["train.steps"] == 4
    assert not {"model.vocab_size", "preset", "optim.eps"} & set(state["changed"])
    assert state["seconds"] > 0
    assert state["ended"] == "finished"
    [start] = state["starts"]
    assert start.keys() >= {"started", "command", "commit", "host", "versions"}
    printed = jaxgpt("info", "run").out
    assert f"step 4: loss {losses[4]:.4f} on 96 windows (best)\n" in printed, "the last evaluation has more windows"
    assert f"started      step 0: {start['command']}; {start['started']}\n" in printed
    assert "step 4/4, 256 tokens in 0:00:0" in printed
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    state = jaxgpt("info", "run", "--json").json["run"]
    assert (state["best"], state["step"], state["tokens"]) == (None, 4, 256)
    first, *_ = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(first)
    assert "trained      step 0/4, 0 tokens in 0:00:00\n" in jaxgpt("info", "run").out, "no step is logged yet"


def test_info_prints_no_windows_if_every_evaluation_has_all(run: Path) -> None:
    settings = json.loads((run / "config.json").read_text())
    settings["train"]["eval_windows"] = 0
    (run / "config.json").write_text(json.dumps(settings))
    assert jaxgpt("info", "run", "--json").json["run"]["windows"] == 0
    assert " windows" not in jaxgpt("info", "run").out


def test_an_interrupt_before_the_first_step_names_what_is_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a new run has written nothing."""
    monkeypatch.setattr("jaxgpt.trainer.loop.train", MagicMock(side_effect=KeyboardInterrupt))
    resumed = resume("run", "--train.steps", "20")
    assert (resumed.code, resumed.err) == (130, "jaxgpt: interrupted: the checkpoint of step 4 is kept\n")
    new = jaxgpt("train", "run", "--out", "new")
    assert new.err.endswith("jaxgpt: interrupted: nothing has been written yet\n")


def test_a_finished_run_has_nothing_to_do(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a checkpoint of a finished run is hashed."""
    hashed = list[Path]()
    config = Run(run).config()
    with monkeypatch.context() as patch:
        patch.setattr("jaxgpt.trainer.finished.find_damage", lambda path: hashed.append(path) or "")
        assert why_finished(Run(run), replace(config, train=replace(config.train, steps=9))) == ""
        assert hashed == []
        assert "already at 4/4" in why_finished(Run(run), config)
        assert hashed == [run / "checkpoints/4"]
    before = (run / "config.json").read_bytes()
    for command in ([], ["--train.steps", "4"], ["--optim.learning-rate", "0.1"]):
        result = resume("run", *command)
        assert (result.code, result.out) == (0, "")
        assert result.err.startswith("jaxgpt: already at 4/4: run is finished")
        assert result.err.count("\n") == 1
    assert (run / "config.json").read_bytes() == before


def test_the_printed_epochs_count_the_windows_before_a_change_of_the_batch_size(run: Path) -> None:
    """Two steps of 4 windows, then four steps of 8 windows: 40 windows in total."""
    config = Run(run).config()
    config = replace(config, train=replace(config.train, steps=6, batch_size=8))
    data = open_data(config)
    program: Any = SimpleNamespace(config=config)
    last = Info(2, tokens=2 * 4 * 16)
    lines = data_lines(program.config, data, last)
    windows = Batches.of(config, data.train).per_epoch
    assert f"4 more steps of 8 x 16 tokens: {40 / windows:.3g} epochs in total" in lines


def test_checkpoints_that_a_killed_process_did_not_delete_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the finished run select the checkpoints to delete, not the settings of the command that is run later."""
    Path("text.txt").write_text(TEXT)
    with monkeypatch.context() as killed:
        killed.setattr(saver, "prune", lambda *_: None)
        kept = flags(train__keep_last=2, train__keep_best=0, train__steps=6)
        assert jaxgpt(*START, *kept, "--data.path", "text.txt", "--out", "run").code == 0
    assert [*checkpoints(Path("run/checkpoints"))] == [2, 4, 6]
    assert resume("run", "--train.keep-last", "1").code == 0
    assert [*checkpoints(Path("run/checkpoints"))] == [4, 6]


def test_a_run_stopped_by_patience_is_finished() -> None:
    """A higher `train.patience` continues the run."""
    Path("text.txt").write_text(TEXT)
    patience = flags(train__patience=1, train__steps=8, optim__learning_rate=1e-9, optim__min_lr=0)
    assert "stopped early at step 4" in jaxgpt(*START, *patience, "--out", "run").err
    for settings in ([], ["--optim.learning-rate", "0.1"]):
        result = resume("run", *settings)
        assert (result.code, result.out, result.err.count("\n")) == (0, "", 1)
        assert "stopped early at 4/8: run is finished" in result.err
    assert max(checkpoints(Path("run/checkpoints"))) == 4
    assert "stopped early at step 6: " in resume("run", "--train.patience", "2").err
    assert "stopped early at 6/20: run is finished" in resume("run", "--train.steps", "20").err


def test_patience_counts_the_evaluations_of_a_run_not_its_steps(run: Path) -> None:
    """One evaluation has followed the best at step 2; the interval may change on resume."""
    last = run / "checkpoints/4"
    info = read_info(last)
    config = Run(run).config()
    recorded = {**info.about, "best": [info.ranking, 2], "since_best": 1}
    older = {name: value for name, value in recorded.items() if name != "since_best"}
    for about in (recorded, older):
        seal(last, replace(info, about=about))
        for patience, is_finished in ((1, True), (2, False)):
            train = replace(config.train, steps=20, eval_every=1, patience=patience)
            assert bool(why_finished(Run(run), replace(config, train=train))) == is_finished


def test_a_plot_that_a_kill_interrupted_is_drawn_on_resume(run: Path) -> None:
    """The kill may leave a temporary file, although all steps are taken."""
    plot = run / "loss.png"
    plot.unlink()
    left = run / ".loss.png.9ec0078c.jaxgpt-tmp"
    left.write_bytes(b"")
    result = resume("run")
    assert result.code == 0, result.err
    assert plot.is_file()
    assert not left.exists()


def test_a_missing_last_evaluation_is_done_on_resume(run: Path) -> None:
    """A run killed during its last evaluation is at the last step, but unfinished."""
    straight = comparable(run)
    last = run / "checkpoints/4"
    seal(last, replace(read_info(last), ranking=None, temporary=True))
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in straight[:-1]))
    assert resume("run").code == 0
    assert comparable(run) == straight


def test_train_steps_below_the_current_step_raise(run: Path) -> None:
    before = (run / "config.json").read_bytes()
    result = resume("run", "--train.steps", "3")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "train.steps 3 is not above the current step 4;" in result.err
    assert (run / "config.json").read_bytes() == before


def test_damaged_baselines_are_computed_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run / "baselines.json"
    before = file.read_text()
    file.write_text('{"losses": 1}')
    assert jaxgpt("plot", "run").err.startswith("jaxgpt: run/baselines.json is damaged: delete it")
    result = resume("run", "--train.steps", "6")
    assert (result.code, file.read_text()) == (0, before), result.err
    file.unlink()
    monkeypatch.setattr("jaxgpt.cli.run_summary.baselines", lambda data: {"losses": 1})
    result = resume("run", "--train.steps", "8")
    assert (result.code, "baseline  " in result.out) == (0, False), "damaged during the run"


def damaged_checkpoints(run: Path) -> None:
    for step, name in ((2, "params/_METADATA"), (4, "checkpoint.json")):
        (run / "checkpoints" / str(step) / name).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            damaged_checkpoints,
            "no valid checkpoint in run/checkpoints: 4: checkpoint.json has changed since it was written; 2: params/_METADATA "
            "has changed since it was written; restore a checkpoint, or start again from step 0: jaxgpt train run --out NEW",
        ),
        (
            lambda run: shutil.rmtree(run / "checkpoints"),
            "run/checkpoints is missing: restore it, or start again from step 0: jaxgpt train run/config.json --out NEW",
        ),
        (lambda run: (run / "tokenizer.json").write_text("{"), "run/tokenizer.json: not valid JSON ("),
    ],
)
def test_a_damaged_run_raises_and_is_not_changed(run: Path, damage: Any, message: str) -> None:
    damage(run)
    before = contents(run)
    result = resume("run")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"jaxgpt: {message}")
    assert contents(run) == before
    if damage is damaged_checkpoints:
        assert "\ncheckpoints  step 2: loss 3" in jaxgpt("info", "run").out
        assert "\n             step 4: its checkpoint.json is damaged\n" in jaxgpt("info", "run").out
    else:
        assert jaxgpt("info", "run").err.startswith(f"jaxgpt: {message}")
    assert jaxgpt("train", "run/config.json", "--out", "NEW").code == 0


def test_adapters_of_a_run_are_trained_in_a_new_run(run: Path) -> None:
    for option in ("rank", "alpha"):
        result = resume("run", f"--lora.{option}", "4")
        assert (result.code, result.err.count("\n")) == (2, 1)
    command = result.err.strip().partition("start a new run: jaxgpt ")[2]
    data = Run(run).config().data.path
    result = jaxgpt(
        *command.replace("PATH", data).split(), *flags(train__steps=1, lora__targets="q_proj"), "--out", "adapted"
    )
    assert result.code == 0, result.err
    assert "keeps lora.rank: 8, not 4; omit it" in resume("adapted", "--lora.rank", "4").err


def contents(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and p.name != LOCK)


def test_other_data_raises(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/4")
    config = json.loads((run / "config.json").read_text())
    Path("text.txt").write_text(TEXT[:-1] + "7")
    config["data"]["path"] = "text.txt"
    (run / "config.json").write_text(json.dumps(config))
    before = contents(run)
    result = resume("run", "--train.steps", "6")
    assert result.code == 2
    assert "the data of run has changed since step 2: text.txt" in result.err.splitlines()[-1]
    assert contents(run) == before


def before_config(run: Path) -> None:
    (run / "config.json").rename(run / ".config.json.jaxgpt-tmp")
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()


def while_saving(run: Path) -> None:
    (run / "checkpoints/2").rename(run / "checkpoints/2.partial.orbax-checkpoint-tmp")
    shutil.rmtree(run / "checkpoints/4")
    (run / LOCK).write_text('{"pid": 1')


@pytest.mark.ci
@pytest.mark.parametrize("moment", [before_config, while_saving])
def test_a_run_killed_before_its_first_checkpoint_starts_again(finished: Path, run: Path, moment: Any) -> None:
    straight = comparable(run)
    moment(run)
    same_command = [*START, "--data.path", str(finished.parent / "text.txt"), "--out", "run", "--resume"]
    if moment is while_saving:
        shutil.copytree(run, "other")
        [said] = resume("other").err.splitlines()
        assert said == "jaxgpt: other has no checkpoint yet: starting again from step 0/4"
        assert comparable(Path("other")) == straight
    result = jaxgpt(*same_command)
    assert result.code == 0, result.err
    assert ("yet: starting a new run" if moment is before_config else "starting again from step 0/4") in result.err
    assert comparable(run) == straight
    assert checkpoints(run / "checkpoints").keys() == checkpoints(finished / "checkpoints").keys()
    assert {p.name for p in run.iterdir()} - {".config.json.jaxgpt-tmp"} == {p.name for p in finished.iterdir()}
    assert jaxgpt(*same_command).err.startswith("jaxgpt: already at 4/4")


def test_the_remains_of_a_killed_replacement_are_deleted(run: Path) -> None:
    """`jaxgpt train --overwrite` was killed while it wrote the draft of the new run, or after it had moved the draft."""
    for remains in (NEW, REPLACED):
        (run / remains / "checkpoints").mkdir(parents=True)
    assert resume("run", "--train.steps", "5").code == 0
    assert not any((run / remains).exists() for remains in (NEW, REPLACED))


@pytest.mark.ci
def test_weights_of_another_run_are_used_again(finished: Path) -> None:
    """A repeated command starts from the same checkpoint even if the base run now has a better checkpoint."""
    shutil.copytree(finished, "base")
    Path("text.txt").write_text(TEXT)
    command = ["train", "finetune", *TINY[-14:], "--init-from", "base", "--data.path", "text.txt", "--out", "run"]
    result = jaxgpt(*command)
    assert result.code == 0, result.err
    straight = comparable(Path("run"))
    started = json.loads(Path("run/config.json").read_text())["init_from"]
    assert started.startswith(f"{Path.cwd()}/base/checkpoints/")
    shutil.rmtree("run/checkpoints")
    Path("run/checkpoints").mkdir()
    better = Path("base/checkpoints") / ("4" if started.endswith("2") else "2")
    seal(better, replace(read_info(better), ranking=0.1))
    Path("link").symlink_to("base")
    linked = ["link" if word == "base" else word for word in command]
    for again in (["train", "--resume", "--out", "run"], [*command, "--resume"], [*linked, "--resume"]):
        result = jaxgpt(*again)
        assert result.code == 0, result.err
        assert comparable(Path("run")) == straight
    for source in (finished, better):
        refused = jaxgpt("train", "--resume", "--out", "run", "--init-from", str(source))
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert f"run started from the weights of {started}" in refused.err
