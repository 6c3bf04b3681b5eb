"""jaxgpt prove-resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TEXT, flags, jaxgpt

from jaxgpt.study import check_resume
from jaxgpt.train.step import TrainState
from jaxgpt.trainer import loop

TINY = flags(
    data__path="text.txt",
    model__n_layer=1,
    model__norm="none",
    model__mlp="none",
    model__n_embd=16,
    model__block_size=16,
    model__dropout=0.1,
    optim__ema_decay=0.9,
    train__batch_size=8,
    train__microbatch=4,
    mesh__data=1,
    steps=6,
    cut=3,
)


@pytest.fixture(autouse=True)
def strict_types() -> None:
    """Disable strict type promotion: these tests trace optax, which relies on it."""


def in_this_process(place: Path, job: dict) -> dict[str, str]:  # type: ignore[type-arg]
    (place / "job.json").write_text(json.dumps(job | {"out": str(place / job["out"])}))
    return check_resume.leg(place / "job.json")


@pytest.mark.ci
def test_equal_in_separate_processes(tmp_path: Path) -> None:
    Path("text.txt").write_text(TEXT)
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", "jaxgpt", "prove-resume", "shakespeare", *TINY, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | compiled, check=False)
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["equal"]
    assert set(proof["sha256"]) == {
        "parameters",
        "optimizer",
        "average",
        "dropout key",
        "next batch",
        "metrics",
    }


def without_moments(*args: object) -> TrainState:
    state = RESTORE(*args)
    return state._replace(opt_state=check_resume.jax.tree.map(check_resume.jax.numpy.zeros_like, state.opt_state))


RESTORE = loop.restore


@pytest.mark.ci
def test_a_resume_that_loses_state_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("text.txt").write_text(TEXT)
    monkeypatch.setattr(check_resume, "run_leg", in_this_process)
    sound = jaxgpt("prove-resume", "shakespeare", *TINY)
    assert sound.code == 0, sound.err
    assert "DIFFERENT" not in sound.out
    monkeypatch.setattr(loop, "restore", without_moments)
    broken = jaxgpt("prove-resume", "shakespeare", *TINY)
    assert broken.code == 1
    rows = {
        line[:12].strip(): line.split()[-1] for line in broken.out.splitlines() if line.endswith(("equal", "DIFFERENT"))
    }
    assert rows["parameters"] == rows["optimizer"] == rows["average"] == "DIFFERENT"
    assert rows["next batch"] == rows["dropout key"] == "equal"
    assert broken.out.endswith("the resumed run differs\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cut", "20"], "--cut must be between 1 and --steps - 1 = 19, not 20"),
        (["--data.path", "missing.txt"], "no such file or folder: missing.txt"),
    ],
)
def test_bad_usage(monkeypatch: pytest.MonkeyPatch, args: list[str], message: str) -> None:
    monkeypatch.setattr(check_resume, "run_leg", in_this_process)
    result = jaxgpt("prove-resume", "shakespeare", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize("args", [(), ("a.json", "b.json")])
def test_a_leg_needs_its_file(args: tuple[str, ...]) -> None:
    result = jaxgpt("prove-resume", "--leg", *args)
    assert (result.code, result.out) == (2, "")
    assert "--leg needs one file" in result.err
