"""The law of followers: no tracker changes a bit of the weights of a run."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
import pytest
from event_files import read_events
from helpers import TEXT, jaxgpt, small_run

from jaxgpt.errors import UserError
from jaxgpt.follow.listener import Follow
from jaxgpt.trainer.events import Listener, Listeners
from jaxgpt.trainer.loop import train
from jaxgpt.trainer.metrics import read_metrics
from jaxgpt.trainer.start import Start

# Modules in the place of wandb.
RAISES = "def init(**_): raise ConnectionError('no network')\nclass Settings:\n    def __init__(self, **_): pass\n"
HANGS = "import time; time.sleep(1000)"
DIES = "import os; os.kill(os.getpid(), 9)"


def weights(listener: Listener, out: str) -> list[bytes]:
    """Train a small run, and return the bits of its final state."""
    Path("text.txt").write_text(TEXT)
    outcome = train(Start(small_run(), out=out), listener)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(outcome.state)]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a module `wandb` of this process and its children."""
    folder = Path("packages").resolve()
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "wandb.py"


@pytest.mark.ci
def test_the_weights_are_equal_with_a_tracker_that_raises_hangs_or_dies(wandb: Path) -> None:
    plain = weights(Listener(), "plain")
    for name, module in {"raises": RAISES, "hangs": HANGS, "dies": DIES}.items():
        wandb.write_text(module)
        notes: list[str] = []
        follow = Follow("wandb", note=notes.append)
        assert weights(Listeners(Listener(), follow), name) == plain
        assert notes[0] == f"sending metrics to wandb, see {name}/trackers/wandb/log.txt"
        [follower] = follow._followers.values() or [None]
        if name == "hangs":
            assert follower
            assert follower.poll() is None, "the run has not waited for the follower"
            follower.kill()
        if follower:
            follower.wait(60)
            follow.failed(RuntimeError())  # any later event
        [_, failed] = notes
        assert failed == (
            f"the follower of wandb failed, see {name}/trackers/wandb/log.txt; "
            f"send the metrics later with: jaxgpt follow {name} --to wandb"
        )
    assert "ConnectionError: no network" in Path("raises/trackers/wandb/log.txt").read_text()


@pytest.mark.ci
def test_train_track_sends_every_line_while_it_trains_and_after_a_resume() -> None:
    Path("text.txt").write_text(TEXT)
    small = "--data.path text.txt --model.n-layer 1 --model.n-head 2 --model.n-embd 16 --model.block-size 16"
    train = ["train", *small.split(), "--train.sample-tokens", "0", "--train.eval-every", "5"]
    first = jaxgpt(*train, "--out", "run", "--train.steps", "20", "--track", "tensorboard")
    assert first.code == 0, first
    assert "jaxgpt: sending metrics to tensorboard, see run/trackers/tensorboard/log.txt\n" in first.err
    resumed = jaxgpt("train", "--resume", "--out", "run", "--train.steps", "30", "--track", "tensorboard")
    assert resumed.code == 0, resumed
    deadline = time.monotonic() + 60
    while Path("run/trackers/tensorboard/log.txt").read_text().count("the run is finished") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    [file] = Path("run/trackers/tensorboard").glob("events.*")
    events = read_events(file)
    lines = list(read_metrics(Path("run/metrics.jsonl")))
    assert [step for step, _, values in events if "loss" in values] == [0, 10, 19, 20, 29]
    assert [step for step, _, values in events if "val_loss" in values] == [5, 10, 15, 20, 25, 30]
    for step, _, values in events:
        [line] = [each for each in lines if each["step"] == step and values.keys() <= each.keys()]
        assert values == pytest.approx({name: line[name] for name in values}, rel=1e-6)
    assert [line["ended"] for line in lines if "ended" in line] == ["finished", "finished"]


def test_a_follower_that_cannot_start_is_one_note() -> None:
    notes: list[str] = []
    follow = Follow("tensorboard", note=notes.append)
    Path("run").write_text("not a directory")
    run = type("Run", (), {"path": Path("run")})
    follow.started(None, None, run, 0)  # type: ignore[arg-type]
    follow.finished(None)  # type: ignore[arg-type]
    assert notes == [
        "cannot start the follower of tensorboard: Not a directory; "
        "send the metrics later with: jaxgpt follow run --to tensorboard"
    ]


def test_an_unknown_tracker_is_found_before_the_run() -> None:
    with pytest.raises(
        UserError, match=r"unknown tracker 'tensorbord' \(did you mean tensorboard\?\): choose from tens"
    ):
        Follow("tensorbord")
    result = jaxgpt("train", "--track", "nosuch", "--out", "run")
    assert (result.code, result.out, [*Path().iterdir()]) == (2, "", [])
    assert result.err == "jaxgpt: unknown tracker 'nosuch': choose from tensorboard, wandb, mlflow, trackio\n"
