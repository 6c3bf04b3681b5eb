"""Whole runs: exact resume, stops, checkpoints and evaluation."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import TEXT, comparable, jaxgpt, small_run
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, DataConfig, MeshConfig, OptimConfig
from jaxgpt.config_json import to_json
from jaxgpt.data import Batches, Data, open_data
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import TrainingFailed, UserError
from jaxgpt.lm import load, save
from jaxgpt.train.loss import RowSums, next_token_loss
from jaxgpt.train.step import STEP_METRICS
from jaxgpt.trainer.build import build
from jaxgpt.trainer.evaluation import ValidationLoss, evaluate, evenly_spaced
from jaxgpt.trainer.evaluators import Measured, Watch
from jaxgpt.trainer.events import Listener, Listeners
from jaxgpt.trainer.loop import Outcome, train
from jaxgpt.trainer.mean_loss import loss_difference, summarize
from jaxgpt.trainer.metrics import HOST_METRICS, MetricsFile, how_ended, read_metrics
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.start import Start


class Silent(Listener):
    def __init__(self, at: dict[int, object] | None = None) -> None:
        self.at, self.notes = at or {}, list[str]()

    def progress(self, metrics: dict[str, float]) -> None:
        if action := self.at.get(int(metrics["step"])):
            action()  # type: ignore[operator]

    def note(self, text: str) -> None:
        self.notes.append(text)


def prepare(config: Config) -> tuple[Program, Data]:
    Path("text.txt").write_text(TEXT)
    data = open_data(config)
    return build(config.with_model(vocab_size=data.tokenizer.vocab_size)), data


def run(config: Config, folder: str, *, resume: bool = False, listener: Silent | None = None) -> Outcome:
    Path("text.txt").write_text(TEXT)
    start = Start(config, run=Run(Path(folder))) if resume else Start(config, folder)
    return train(start, listener or Silent())


def same_bits(a: object, b: object) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(data=1), marks=pytest.mark.long, id="one"),  # the tests of killed runs cover it as well
        pytest.param(MeshConfig(data=2, fsdp=2), id="mesh"),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(mesh: MeshConfig) -> None:
    """Train with dropout, accumulation, Muon and an EMA, and interrupt within an epoch."""
    config = small_run(steps=14, eval_every=5, accumulation=2, steps_per_call=2)
    optim = OptimConfig(name="muon", warmup_steps=2, ema_decay=0.9, not_finite="skip")
    config = replace(config, mesh=mesh, optim=optim).with_model(dropout=0.2)
    straight = run(config, "straight")
    # The interrupted run has the same number of steps in its config.
    cut = run(config, "cut", listener=Silent({6: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert cut.stopped
    assert 5 < int(cut.state.step) < 14
    resumed = run(config, "cut", resume=True)
    assert same_bits(resumed.state, straight.state)
    assert comparable("cut") == comparable("straight")
    evaluations = [outcome.evaluation._replace(seconds=0.0, rows=None) for outcome in (resumed, straight)]
    assert same_bits(*evaluations)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lion", "sgd", "adafactor"])
def test_every_optimizer_resumes_bit_for_bit(name: Any) -> None:
    """Train on a mesh, with scanned layers and two steps per call; Adafactor factors the moments of the MLP."""
    config = small_run(steps=8, eval_every=8, steps_per_call=2, scan_layers=True)
    optim = OptimConfig(name=name, warmup_steps=2, momentum_dtype="bfloat16")
    config = replace(config, mesh=MeshConfig(data=1, fsdp=2), optim=optim).with_model(n_embd=128, n_layer=2)
    straight = run(config, "straight")
    assert run(config, "cut", listener=Silent({1: lambda: os.kill(os.getpid(), signal.SIGTERM)})).stopped
    assert same_bits(run(config, "cut", resume=True).state, straight.state)


@pytest.mark.ci
def test_steps_per_call_do_not_change_a_run() -> None:
    """Runs are equal bit for bit with an interruption anywhere, and nearly equal to a run with one step per call."""
    config = small_run(steps=15, eval_every=12, steps_per_call=3)
    config = replace(config, mesh=MeshConfig(data=2)).with_model(dropout=0.2)
    straight = run(config, "straight")
    cut = run(config, "cut", listener=Silent({1: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert int(cut.state.step) == 10
    resumed = run(config, "cut", resume=True)
    assert same_bits(resumed.state, straight.state)
    assert comparable("cut") == comparable("straight")
    one = run(replace(config, train=replace(config.train, steps_per_call=1)), "one")
    lines = [comparable(name) for name in ("one", "straight")]
    for expected, line in zip(*lines, strict=True):
        assert line.pop("val_data", None) == expected.pop("val_data", None)  # a fingerprint, not a number
        assert line == pytest.approx(expected, rel=1e-5)
    for x, y in zip(jax.tree.leaves(one.state), jax.tree.leaves(straight.state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_a_run_writes_checkpoints_and_metrics() -> None:
    run(small_run(), "out")
    losses = {step: info.ranking for step, info in checkpoints(Path("out/checkpoints")).items()}
    assert list(losses) == [4, 8]
    lines = list(read_metrics(Path("out/metrics.jsonl")))
    assert [line["step"] for line in lines if "loss" in line] == list(range(8))
    assert {line["step"]: line["val_loss"] for line in lines if "val_loss" in line} == losses
    assert {"step", "loss", "lr", "grad_norm", "tokens", "elapsed_seconds"} <= set(lines[1])
    assert set().union(*lines[1:]) <= {*STEP_METRICS, *HOST_METRICS}
    *_, last, evaluated, end = lines
    assert last["tokens"] == 8 * 8 * 16
    assert "val_loss" in evaluated
    assert end == {"step": 8, "ended": "finished"}
    with Path("out/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 1.0, "elapsed_seconds": null}\n{"step": 8, "lo')
    assert list(read_metrics(Path("out/metrics.jsonl"))) == lines, "damaged lines are skipped"


def test_a_listener_is_called_for_every_step_and_stage() -> None:
    """Calls do not depend on log_every; otherwise the progress line of a slow model would not change for hours."""
    heard: list[object] = []

    class Listener(Silent):
        def stage(self, name: str, done: int = 0, total: int = 0) -> None:
            if name not in ("", "tokenizing") and (not heard or heard[-1] != name):
                heard.append(name)

        def compiled(self, seconds: float) -> None:
            heard.append("compiled")

        def progress(self, metrics: dict[str, float]) -> None:
            heard.append(int(metrics["step"]))
            assert {"loss", "lr", "grad_norm"} <= set(metrics)
            assert ("seconds_left" in metrics) == (metrics["step"] > 0)

    run(small_run(steps=3, log_every=100, eval_every=2), "out", listener=Listener())
    assert heard[:4] == ["compiling", "compiled", 0, 1]
    assert heard[4:] == ["evaluating", "saving a checkpoint", 2, "evaluating", "saving a checkpoint"]


def test_nan_stops_and_keeps_the_last_good_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Program.step

    def bad(self: Program, state: Any, batch: Any) -> Any:
        state, metrics = step(self, state, batch)
        return state, metrics | ({"loss": np.float32(np.nan)} if int(state.step) == 7 else {})

    monkeypatch.setattr(Program, "step", bad)
    with pytest.raises(TrainingFailed, match="loss is nan at step 6: stopped, the checkpoint of step 4 is kept"):
        run(small_run(), "out")
    assert list(checkpoints(Path("out/checkpoints"))) == [4]
    *lines, end = read_metrics(Path("out/metrics.jsonl"))
    assert max(line["step"] for line in lines) == 5
    assert end == {"step": 6, "ended": "failed"}


@pytest.mark.parametrize("error", [UserError("a.bin: id 99"), OSError(5, "Input/output error", "a.bin")])
def test_data_that_become_unreadable_stop_the_run_and_lose_no_step(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Batches.at

    def fail(self: Batches, step: int) -> Any:
        if step == 6:
            raise error
        return at(self, step)

    with monkeypatch.context() as damaged:
        damaged.setattr(Batches, "at", fail)
        with pytest.raises(TrainingFailed, match=r"a\.bin: .*: stopped, the checkpoint of step 6 is kept"):
            run(small_run(), "out")
    assert [line["step"] for line in read_metrics(Path("out/metrics.jsonl")) if "loss" in line] == list(range(6))
    assert int(run(small_run(), "out", resume=True).state.step) == 8


def test_a_token_file_that_is_truncated_while_it_is_read_stops_the_run_and_loses_no_step() -> None:
    """Reading beyond the end of the mapped file would kill the process with SIGBUS."""
    np.random.default_rng(0).integers(0, 250, 400_000).astype("<u2").tofile("ids.bin")
    before = Path("ids.bin").read_bytes()
    config = replace(small_run(eval_every=8, eval_windows=4), data=DataConfig(path="ids.bin", tokenizer="byte"))
    straight = train(Start(config, "straight"), Silent())
    message = (
        r"ids\.bin was truncated .* it has 4,096 of 800,000 bytes; .*: stopped, the checkpoint of step [45] is kept"
    )
    with pytest.raises(TrainingFailed, match=message):
        train(Start(config, "out"), Silent({1: lambda: os.truncate("ids.bin", 4096)}))
    Path("ids.bin").write_bytes(before)
    resumed = train(Start(config, run=Run(Path("out"))), Silent())
    assert same_bits(resumed.state, straight.state)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            r"out of device memory in the evaluation at step 4 .*; lower --train\.eval-batch-size, now 8: stopped, the "
            r"checkpoint of step 4 is kept",
        ),
        (
            MemoryError("Unable to allocate 9 TiB"),
            r"out of memory on the host \(Unable to allocate 9 TiB\) in the evaluation at step 4; lower "
            r"--train\.eval-batch-size, now 8: stopped, the checkpoint of step 4 is kept",
        ),
    ],
)
def test_memory_exhausted_by_an_evaluation_loses_no_step(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    straight = run(small_run(), "straight")
    with monkeypatch.context() as full:
        full.setattr(Program, "sums", fail)
        with pytest.raises(TrainingFailed, match=message):
            run(small_run(), "out")
    assert same_bits(run(small_run(), "out", resume=True).state, straight.state)
    assert comparable("out") == comparable("straight")


class Bug(Exception):
    """An error of the user's own code."""


def bug(*_: object) -> None:
    raise Bug("mine")


class Heard(Silent):
    def evaluated(self, step: int, result: object) -> None:
        bug()


@pytest.mark.parametrize(
    ("listener", "steps_per_call"),
    [pytest.param(Silent({1: bug, 2: bug, 3: bug}), 4, id="progress"), pytest.param(Heard(), 1, id="evaluated")],
)
def test_a_listener_that_raises_loses_no_step(listener: Silent, steps_per_call: int) -> None:
    """Its exception reaches the caller, with a note; the resumed run equals a run without the error."""
    config = small_run(steps=9, eval_every=4, steps_per_call=steps_per_call)
    straight = run(config, "straight")
    with pytest.raises(Bug, match="mine") as error:
        run(config, "out", listener=listener)
    [saved] = checkpoints(Path("out/checkpoints"))
    assert error.value.__notes__ == [f"jaxgpt: step {saved} was saved in out/checkpoints"]
    assert [line["step"] for line in read_metrics(Path("out/metrics.jsonl")) if "loss" in line] == list(range(saved))
    assert same_bits(run(config, "out", resume=True).state, straight.state)
    assert comparable("out") == comparable("straight")


def test_an_error_of_a_run_reaches_all_listeners_and_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that raises meanwhile does not replace the error, which may be the reason of its exception."""

    class Raising(Silent):
        def failed(self, error: BaseException) -> None:
            raise ValueError("no connection")

    class Receiving(Silent):
        def failed(self, error: BaseException) -> None:
            heard.append(error)

    heard: list[BaseException] = []
    monkeypatch.setattr("jaxgpt.trainer.loop.run_loop", bug)
    with pytest.raises(Bug, match="mine") as error:
        train(Start(small_run()), Listeners(Raising(), Receiving()))
    assert heard == [error.value]
    assert error.value.__notes__ == ["jaxgpt: Raising.failed raised ValueError: no connection"]


def test_an_evaluator_that_raises_loses_no_step() -> None:
    config = small_run()
    Path("text.txt").write_text(TEXT)
    with pytest.raises(Bug, match="mine") as error:
        train(Start(config, "out", evaluators=(bug,)), Silent())  # type: ignore[arg-type]
    assert error.value.__notes__ == ["jaxgpt: step 4 was saved in out/checkpoints"]
    outcome = train(Start(config, run="out", evaluators=(ValidationLoss(),)), Silent())
    assert int(outcome.state.step) == 8


@pytest.mark.parametrize("worst", [math.inf, math.nan, np.float32(math.inf)])
def test_a_ranking_that_is_no_number_loses_no_step(worst: Any) -> None:
    """An example is the perplexity of a task without any right answer. Scalars of NumPy are numbers, too."""
    rankings = iter([worst, np.float32(2.5)])
    notes = list[str]()

    class Noted(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    def evaluator(program: Program, params: Any, watch: Any) -> Any:
        return Measured({"score": np.float32(0.5)}, next(rankings))

    Path("text.txt").write_text(TEXT)
    train(Start(small_run(), "out", evaluators=(evaluator,)), Noted())
    found = checkpoints(Path("out/checkpoints"))
    assert {step: info.ranking for step, info in found.items()} == {4: None, 8: 2.5}
    assert found[4].about["since_best"] == 0, "a resume repeats this evaluation, and then counts it"
    assert [note for note in notes if "ranking" in note] == [
        f"the ranking of the evaluation at step 4 is {float(worst)}, so its checkpoint has no rank"
    ]
    assert [line["score"] for line in read_metrics(Path("out/metrics.jsonl")) if "score" in line] == [0.5, 0.5]


def test_an_evaluator_that_deletes_the_weights_keeps_the_last_checkpoint() -> None:
    def destroy(program: Program, params: Any, watch: Any) -> Any:
        jax.tree.leaves(params)[0].delete()
        raise Bug("mine")

    Path("text.txt").write_text(TEXT)
    with pytest.raises(Bug, match="mine") as error:
        train(Start(small_run(checkpoint_every=3), "out", evaluators=(destroy,)), Silent())
    assert error.value.__notes__ == ["jaxgpt: step 4 could not be saved: the arrays of the state have been deleted"]
    assert list(checkpoints(Path("out/checkpoints"))) == [3]


def test_a_feed_that_raises_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Batches.at
    monkeypatch.setattr(Batches, "at", lambda self, step: bug() if step == 6 else at(self, step))
    with pytest.raises(Bug, match="mine") as error:
        run(small_run(), "out")
    assert error.value.__notes__ == ["jaxgpt: step 6 was saved in out/checkpoints"]
    assert list(checkpoints(Path("out/checkpoints"))) == [4, 6]


def test_a_listener_that_exits_loses_no_step() -> None:
    with pytest.raises(SystemExit):
        run(small_run(eval_every=8), "out", listener=Silent({2: lambda: sys.exit(3)}))
    assert list(checkpoints(Path("out/checkpoints"))) == [5]


def test_a_listener_that_raises_does_not_save_a_diverged_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of the next step are not read yet, and its loss is NaN."""
    step = Program.step

    def bad(self: Program, state: Any, batch: Any) -> Any:
        state, metrics = step(self, state, batch)
        return state, metrics | ({"loss": np.float32(np.nan)} if int(state.step) == 7 else {})

    monkeypatch.setattr(Program, "step", bad)
    with pytest.raises(Bug, match="mine") as error:
        run(small_run(), "out", listener=Silent({5: bug}))
    assert error.value.__notes__ == ["jaxgpt: step 8 could not be saved: loss is nan at step 6"]
    assert list(checkpoints(Path("out/checkpoints"))) == [4]


def test_an_error_of_own_code_is_one_line_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("text.txt").write_text(TEXT)
    monkeypatch.setattr("jaxgpt.cli.run_printer.RunPrinter.evaluated", bug)
    Path("settings.json").write_text(to_json(small_run()))
    result = jaxgpt("train", "settings.json", "--out", "out")
    assert result.code == 1
    assert result.err == (
        "jaxgpt: Bug: mine: step 4 was saved in out/checkpoints; resume with: jaxgpt train --resume --out out\n"
    )
    assert Path("out/loss.png").is_file(), "the losses of a failed run are drawn"


def test_notes_of_jax_are_not_notes_of_the_saved_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        error = TypeError("shapes")
        error.add_note("For simplicity, JAX has removed its internal frames")
        raise error

    Path("text.txt").write_text(TEXT)
    monkeypatch.setattr("jaxgpt.trainer.loop.train", fails)
    Path("settings.json").write_text(to_json(small_run()))
    with pytest.raises(TypeError, match="shapes"):
        jaxgpt("train", "settings.json", "--out", "out")


def test_a_nan_found_by_jax_itself_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With JAX_DEBUG_NANS, JAX raises from inside the step."""
    step = Program.step

    def bad(self: Program, state: Any, batch: Any) -> Any:
        if int(state.step) == 6:
            jax.numpy.zeros(1) / 0
        return step(self, state, batch)

    monkeypatch.setattr(Program, "step", bad)
    message = r"invalid value \(nan\) encountered in .* at step 6: stopped, the checkpoint of step 4 is kept \(a lower"
    with jax.debug_nans(True), pytest.raises(TrainingFailed, match=message) as error:
        run(small_run(), "out")
    assert "\n" not in str(error.value)


def test_a_floating_point_error_of_the_code_itself_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise FloatingPointError("divide by zero")

    monkeypatch.setattr(Program, "step", bug)
    with pytest.raises(FloatingPointError):
        run(small_run(), "out")


def test_memory_of_the_host_that_is_exhausted_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Batches.at

    def fail(self: Batches, step: int) -> Any:
        if step == 6:
            raise MemoryError("Unable to allocate 9 TiB")
        return at(self, step)

    monkeypatch.setattr(Batches, "at", fail)
    message = r"out of memory on the host \(Unable to allocate 9 TiB\): stopped, the checkpoint of step 6 is kept"
    with pytest.raises(TrainingFailed, match=message):
        run(small_run(), "out")


def test_out_of_memory_errors_come_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Program, state: object, batch: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    monkeypatch.setattr(Program, "step", full)
    with pytest.raises(
        TrainingFailed, match=r"out of device memory .* raise --train.accumulation, .* no checkpoint yet"
    ):
        run(small_run(), "out")


def test_a_file_system_that_cannot_rename_directories_is_found_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = run(small_run(), "old", listener=Silent({1: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert stopped.stopped
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.is_dir() and any(self.iterdir()):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(Program, "step", lambda *_: pytest.fail("no step"))
    with pytest.raises(UserError, match=r"cannot write to new: .* gcsfuse --rename-dir-limit 200000"):
        run(small_run(), "new")
    assert not Path("new").exists()
    with pytest.raises(UserError, match=r"cannot write to old: .* gcsfuse --rename-dir-limit 200000"):
        run(small_run(), "old", resume=True)


def test_a_disk_without_room_for_a_checkpoint_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: (10**6, 10**6, 10))
    monkeypatch.setattr(Program, "step", lambda *_: pytest.fail("no step"))
    with pytest.raises(UserError, match=r"a checkpoint takes about .* has 10 bytes of free space: free at least"):
        run(small_run(), "new")
    assert not Path("new").exists()


def test_other_files_in_the_directory_of_a_new_run_are_noted_and_kept() -> None:
    Path("out").mkdir()
    for name in ("notes.txt", "slurm.log", ".hidden"):
        Path("out", name).touch()
    listener = Silent()
    run(small_run(steps=1, eval_every=1), "out", listener=listener)
    assert listener.notes == ["keeping the files in out that are not part of a run: notes.txt and 1 more"]
    assert Path("out/notes.txt").exists()


def test_a_second_writer_of_a_run_that_trains_is_refused_and_the_first_is_unharmed() -> None:
    """Resume, replace, import into and save over a run while it trains, then compare with an undisturbed run."""
    straight = run(small_run(), "straight")
    seconds = list[Any]()

    def disturb() -> None:
        lm = load("straight")
        with pytest.raises(UserError, match="out is being written by process"):
            save(lm, "out", overwrite=True)
        for words in ("train --resume --out out", "train out --resume", "train straight --out out --overwrite"):
            seconds.append(jaxgpt(*words.split()))

    disturbed = run(small_run(), "out", listener=Silent({5: disturb}))
    for second in seconds:
        assert (second.code, second.err.count("\n")) == (2, 1 + second.err.count("using the settings of")), second.err
        assert f"out is being written by process {os.getpid()} on" in second.err
    assert same_bits(disturbed.state, straight.state)
    assert comparable("out") == comparable("straight")


def test_a_run_that_is_renamed_while_it_trains_can_be_resumed_at_its_old_path() -> None:
    config = small_run(steps=12, eval_every=12)
    straight = run(config, "straight")
    first = Silent({5: lambda: Path("old").rename("new"), 6: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    stopped = run(config, "old", listener=first)
    done = stopped.step
    assert first.notes == [
        f"old was renamed or deleted: its checkpoints and metrics are in a new old, starting at step {done}"
    ]

    again = Silent()
    resumed = run(config, "old", resume=True, listener=again)
    assert again.notes == [f"resuming from old/checkpoints/{done} at step {done}/12"]
    assert same_bits(resumed.state, straight.state)
    assert [line["step"] for line in read_metrics(Path("old/metrics.jsonl")) if "loss" in line] == [*range(done, 12)]
    assert Run(Path("old")).config() == Run(Path("new")).config()


def test_settings_that_end_a_resume_before_its_first_step_do_not_change_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(small_run(), "out")
    before = Path("out/config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: (10**6, 10**6, 10))
        with pytest.raises(UserError, match="free at least"):
            run(small_run(steps=12), "out", resume=True)
        assert Path("out/config.json").read_bytes() == before

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(UserError, match="out of device memory"):
            run(small_run(steps=12), "out", resume=True)
    assert Path("out/config.json").read_bytes() == before


def test_a_run_moved_to_a_directory_with_a_backslash_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    run(small_run(), "run")
    Path("run").rename("a\\b")
    for act in (lambda: run(small_run(steps=9), "a\\b", resume=True), lambda: load("a\\b")):
        with pytest.raises(UserError, match="reads a backslash as a separator of directories: rename the directory"):
            act()


@pytest.fixture
def overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with non-finite outputs."""

    def bad(*args: Any, **options: Any) -> Any:
        good = next_token_loss(*args, **options)
        return lambda *args: jax.tree.map(lambda x: x * jax.numpy.nan, good(*args))

    monkeypatch.setattr("jaxgpt.trainer.build.next_token_loss", bad)


def test_too_many_consecutive_skips_stop_the_run(overflow: None) -> None:
    config = replace(small_run(), optim=OptimConfig(warmup_steps=2, not_finite="skip", skip_limit=3))
    listener = Silent()
    with pytest.raises(TrainingFailed, match="at step 2 after 3 skipped updates in a row, and no gradient is finite"):
        run(config, "out", listener=listener)
    assert [note.split(":")[0] for note in listener.notes] == ["step 0", "step 1", "step 2"]
    assert list(checkpoints(Path("out/checkpoints"))) == []


def test_a_signal_during_compilation_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops as soon as the step is compiled, and can be resumed."""
    lower = Program.lower

    def asked(self: Program, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return lower(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "lower", asked)
        for resume in (False, True, True):  # and again, still at step 0
            assert run(small_run(), "out", resume=resume).stopped
    assert list(checkpoints(Path("out/checkpoints"))) == [0]
    assert not run(small_run(), "out", resume=True).stopped


def test_metrics_lines_past_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 3, "loss": 1.0},
        {"step": 4, "val_loss": 2.0},
        {"step": 4, "loss": 3.0},
        {"step": 5, "val_loss": 1.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo')
    with MetricsFile(path, Info(4)) as file:
        file.write(step=4, loss=0.5, grad_norm=float("nan"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*lines[:2], {"step": 4, "loss": 0.5}]


def test_the_end_of_an_earlier_process_is_kept_and_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ended = [{"step": 3, "loss": 1.0}, {"step": 4, "ended": "stopped"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*ended, {"step": 5, "ended": "failed"}]))
    assert how_ended(list(read_metrics(path)), 9) == "failed"
    with MetricsFile(path, Info(4)) as file:
        file.write(step=4, started="now")
        assert how_ended(list(read_metrics(path)), 9) == "", "it trains"
        file.end(6, "finished")
    assert list(read_metrics(path)) == [*ended, {"step": 4, "started": "now"}, {"step": 6, "ended": "finished"}]
    assert how_ended(list(read_metrics(path)), 9) == "finished"


def test_standard_error_is_that_of_window_means() -> None:
    for weight in (1, 0.25):  # the count of one token
        result = summarize(weight * np.array([2.0, 4.0, 6.0]), weight * np.array([2, 2, 2]))
        assert (result.loss, result.windows, result.tokens) == (2.0, 3, round(6 * weight))
        np.testing.assert_allclose(result.stderr, 1 / np.sqrt(3))


def test_the_error_of_a_change_is_that_of_the_differences_of_the_windows() -> None:
    """Change and error equal the mean and error of the differences, even with unequal numbers of tokens."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 50)
    before = counts * rng.normal(2, 1, 50)
    shifts = counts * rng.normal(0.1, 0.01, 50)
    found, expected = (
        loss_difference(summarize(before, counts), summarize(before + shifts, counts)),
        summarize(shifts, counts),
    )
    np.testing.assert_allclose(found, (expected.loss, expected.stderr), rtol=1e-9)
    assert 10 * found[1] < summarize(before, counts).stderr
    assert np.isnan(loss_difference(summarize(before[:1], counts[:1]), summarize(shifts[:1], counts[:1]))[1])
    with pytest.raises(UserError, match="no token of the evaluated windows is counted"):
        summarize(np.zeros(2), np.zeros(2, np.int32))


@given(n=st.integers(1, 10_000), wanted=st.integers(0, 20_000))
def test_evaluation_windows_are_spread_over_the_split(n: int, wanted: int) -> None:
    windows = evenly_spaced(n, wanted)
    assert len(windows) == min(wanted or n, n)
    gaps = np.diff(np.append(windows, n))
    assert windows[0] == 0
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


def test_partial_evaluations_are_compared_on_the_same_windows() -> None:
    """The last evaluation covers the split, but its checkpoint has the loss on the windows of the earlier evaluations."""
    run(small_run(eval_windows=3), "out")
    lines = {m["step"]: m for m in read_metrics(Path("out/metrics.jsonl")) if "val_loss" in m}
    program, data = prepare(small_run(eval_windows=3))
    state = program.restore(Path("out/checkpoints"), 8)
    some = evaluate(program, state.params, data.val, Watch(final=False))
    every = evaluate(program, state.params, data.val)
    assert some.windows == lines[4]["val_windows"] == 3
    assert every.windows == lines[8]["val_windows"] > 3
    assert lines[8]["val_loss"] == every.loss != some.loss
    infos = checkpoints(Path("out/checkpoints"))
    assert (infos[4].ranking, infos[8].ranking) == (lines[4]["val_loss"], every.ranking)
    np.testing.assert_allclose(every.ranking, some.loss, rtol=1e-6)


def test_an_evaluated_batch_has_no_more_rows_than_the_split_has_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    program, data = prepare(small_run(eval_batch_size=10**6, eval_windows=3))
    shapes = []

    def recorded(params: Any, windows: jax.Array) -> RowSums:
        shapes.append(windows.shape)
        return RowSums(jax.numpy.ones(len(windows)), jax.numpy.ones(len(windows)))

    monkeypatch.setattr(type(program), "sums", staticmethod(recorded))
    result = evaluate(program, None, data.val)
    evaluate(program, None, data.val, Watch(final=False))
    assert {rows for rows, _ in shapes} == {result.windows}


@pytest.mark.parametrize("n", [0, 1])
def test_a_split_without_windows_is_an_error_of_one_line(n: int) -> None:
    program, _ = prepare(small_run())
    with pytest.raises(UserError, match=f"the split has no window to evaluate: it has {n} tokens; use a longer text"):
        evaluate(program, None, Tokens([np.zeros(n, np.int32)]))


@pytest.mark.ci
def test_evaluation_does_not_depend_on_the_batch() -> None:
    losses = []
    for size, mesh in ((1, 1), (3, 1), (8, 4)):
        config = replace(small_run(eval_batch_size=size), mesh=MeshConfig(data=mesh))
        program, data = prepare(config)
        losses.append(evaluate(program, program.init().params, data.val))
    np.testing.assert_allclose([r.loss for r in losses], losses[0].loss, rtol=1e-6)
    assert {r.windows for r in losses} == {losses[0].windows}
