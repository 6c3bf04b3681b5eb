"""Real runs, killed with SIGKILL and restarted as a scheduler would, end like an uninterrupted run, bit for bit.

Each run has dropout, gradient accumulation, an EMA, skipping of bad updates, checkpoints by steps and by time, and several
epochs.
One of two scripts starts and restarts it until it exits with 0:

    if [ -f RUN/config.json ]; then jaxgpt train --resume --out RUN; else jaxgpt train shakespeare FLAGS --out RUN; fi
    jaxgpt train shakespeare FLAGS --out RUN --resume

A process is killed within its first second, at any other time, shortly after Orbax's temporary directory appears, or when it
touches a file of the run or of its cache for the n-th time. This covers every stage of creating the run, writing, committing
and deleting checkpoints, writing metrics and caching compiled programs.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import comparable

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import restore
from jaxgpt.cli import main
from jaxgpt.runtime import COMPILED_BYTES, keep_compiled
from jaxgpt.trainer.build import build

TEXT = "".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {2 * n}.\n" for n in range(80))
FLAGS = (
    "--data.path text.txt --model.n-layer 1 --model.n-embd 16 --model.n-head 2 --model.block-size 16 "
    "--model.dropout 0.2 --optim.ema-decay 0.9 --optim.not-finite skip --optim.warmup-steps 5 "
    "--train.steps 32 --train.batch-size 8 --train.accumulation 2 --train.eval-every 5 --train.log-every 1 "
    "--train.checkpoint-seconds 0.3 --train.keep-every 15 --train.sample-tokens 5 --mesh.data 1"
).split()
AIMS = ("start", "file", "file", "folder", "time")
FEW = 30  # file operations while a run is created


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.ci), pytest.param(100, marks=pytest.mark.long)])
def test_killed_runs_end_like_an_uninterrupted_run(tmp_path: Path, kills: int) -> None:
    dice, killed, runs, began = random.Random(3), 0, 0, time.monotonic()
    (tmp_path / "text.txt").write_text(TEXT)
    straight = start(tmp_path, "straight")
    straight.join()
    duration, (out, err) = time.monotonic() - began, printed(tmp_path, "straight")
    assert straight.exitcode == 0, err
    events = int(err.rsplit("events ", 1)[1])
    while killed < kills:
        name, always, runs = f"run{runs}", dice.choice((False, True)), runs + 1
        while True:
            aim = dice.choice(AIMS) if killed < kills else "nothing"
            event = dice.randint(1, dice.choice((FEW, events // 2))) if aim == "file" else 0
            process = start(tmp_path, name, always, event)
            strike(process, aim, tmp_path / name, dice, duration)
            process.join()
            last_out, last_err = printed(tmp_path, name)
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL, last_err
            killed += 1
        assert differences(tmp_path / "straight", tmp_path / name) == []
        damaged = list((tmp_path / name / "checkpoints").glob("*.damaged"))
        assert not damaged, "checkpoints on disk are valid whenever the run is killed"
        # A process killed after its last checkpoint leaves no work to resume.
        assert "already at 32/32" in last_err or sample(out) == sample(last_out)


def differences(a: Path, b: Path) -> list[str]:
    """Return the differences between two finished runs, ignoring times."""
    found = []
    if (a / "config.json").read_bytes() != (b / "config.json").read_bytes():
        found.append("config.json")
    if comparable(a) != comparable(b):
        found.append("metrics.jsonl")
    kept, others = ({s: i.ranking for s, i in checkpoints(run / "checkpoints").items()} for run in (a, b))
    if kept != others:
        return [*found, "which checkpoints are kept"]
    abstract = build(Run(a).config()).abstract.state
    for step in kept:
        one, other = (restore(run / "checkpoints", step, abstract) for run in (a, b))
        pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
        found += [f"{step}: {path}" for (path, x), y in pairs if np.asarray(x).tobytes() != np.asarray(y).tobytes()]
    names = {p.name for p in b.rglob("*") if not p.is_relative_to(b / "checkpoints")} | {"checkpoints"}
    drawn = {"loss.png", "baselines.json"}  # missing if a process is killed after its last checkpoint
    return found + sorted((names ^ {p.name for p in a.iterdir()}) - drawn)


def start(folder: Path, name: str, always: bool = False, kill_at_event: int = 0) -> BaseProcess:
    """Start as the scheduler's script does: always with `--resume`, or only if the run exists."""
    command = ["shakespeare", "--out", name, *FLAGS]
    if always:
        command += ["--resume"]
    elif (folder / name / "config.json").exists():
        command = ["--resume", "--out", name]
    # A process may be killed before it opens its outputs.
    for stream in ("out", "err"):
        (folder / f"{name}.{stream}").write_text("")

    # Fork from a process that has imported everything and started no backend: imports take a third of the time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "jaxgpt.cli.train", "jaxgpt.cli.run_printer", "jaxgpt.study.run_figures"])
    process = context.Process(target=_child, args=(folder, name, kill_at_event, ["train", *command]))
    process.start()
    return process


def strike(process: BaseProcess, aim: str, run: Path, dice: random.Random, duration: float) -> None:
    """Kill a process from outside."""
    if aim in ("start", "time"):
        _sleep(process, dice.uniform(0, 1.0 if aim == "start" else duration))
    elif aim == "folder":
        skip = dice.randint(0, 3)
        for _ in range(skip):
            _wait(process, lambda: any((run / "checkpoints").glob("*-tmp*")))
            _wait(process, lambda: not any((run / "checkpoints").glob("*-tmp*")))
        _wait(process, lambda: any((run / "checkpoints").glob("*-tmp*")))
        _sleep(process, dice.uniform(0, 0.05))
    else:
        return
    process.kill()


def _wait(process: BaseProcess, condition: Callable[[], bool]) -> None:
    while process.is_alive() and not condition():
        time.sleep(0.001)


def _sleep(process: BaseProcess, seconds: float) -> None:
    end = time.monotonic() + seconds
    _wait(process, lambda: time.monotonic() > end)


def printed(folder: Path, name: str) -> list[str]:
    return [Path(folder / f"{name}.{stream}").read_text() for stream in ("out", "err")]


def sample(out: str) -> str:
    return out.split("--- a sample", 1)[1].split("\n---\n")[0]


def _child(folder: Path, name: str, kill_at_event: int, args: list[str]) -> None:
    """Run the command in a process that kills itself just before it touches one of its files for the n-th time."""
    os.chdir(folder)
    sys.stdout, sys.stderr = (Path(f"{name}.{stream}").open("w") for stream in ("out", "err"))  # noqa: SIM115
    os.environ["JAXGPT_CACHE"] = str(folder / f"{name}.cache")
    keep_compiled()
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_platforms", "cpu")
    events = 0
    kinds = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")

    def hook(event: str, values: tuple[object, ...]) -> None:
        nonlocal events
        parts = str(values[0]).split("/") if event in kinds else []
        if name in parts or f"{name}.cache" in parts or any(part.startswith(f".{name}.") for part in parts):
            events += 1
            if events == kill_at_event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = main(args)
    print(f"events {events}", file=sys.stderr)
    sys.exit(code)
