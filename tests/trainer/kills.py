"""Kill real runs with SIGKILL, restart them as a scheduler would, and compare the results with an uninterrupted run.

    python tests/trainer/kills.py --kills 100

Each run has dropout, gradient accumulation, a weight average, a guard, checkpoints by steps and by time, and several epochs.
One of two scripts starts and restarts it until it exits with 0:

    if [ -f RUN/config.json ]; then jaxgpt train --resume --out RUN; else jaxgpt train shakespeare FLAGS --out RUN; fi
    jaxgpt train shakespeare FLAGS --out RUN --resume

A process is killed within its first second, at any other time, shortly after Orbax's temporary directory appears, or when it
touches a file of the run or of its cache for the n-th time. This covers every stage of creating the run, writing, committing
and deleting checkpoints, writing metrics and caching compiled programs. At the end, weights, optimizer state, EMA, guard,
metrics, checkpoints and sample must match the uninterrupted run bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax
import numpy as np
from helpers import comparable

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import checkpoints, restore
from jaxgpt.cli import main
from jaxgpt.runtime import COMPILED_BYTES, keep_compiled
from jaxgpt.trainer.metrics import read_metrics
from jaxgpt.trainer.program import build

TEXT = "".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {2 * n}.\n" for n in range(80))
FLAGS = (
    "--data.path text.txt --model.n-layer 1 --model.n-embd 16 --model.n-head 2 --model.block-size 16 "
    "--model.dropout 0.2 --optim.ema-decay 0.9 --optim.not-finite skip --optim.warmup-steps 5 "
    "--train.steps 32 --train.batch-size 8 --train.accumulation 2 --train.eval-every 5 --train.log-every 1 "
    "--train.checkpoint-seconds 0.3 --train.keep-every 15 --train.sample-tokens 5 --mesh.data 1"
).split()
AIMS = ("start", "file", "file", "folder", "time")
FEW = 30  # file operations while a run is created


@dataclass
class Tally:
    """Result of a campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    runs: int = 0
    identical: int = 0
    set_aside: int = 0
    from_start: int = 0
    repeated: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        total = self.kills.total()
        return (
            f"kills survived   {self.survived} of {total} ({', '.join(f'{n} by {a}' for a, n in self.kills.items())})\n"
            f"runs identical   {self.identical} of {self.runs}\n"
            f"no checkpoint    {self.from_start} of them: started again from step 0\n"
            f"steps repeated   {sum(self.repeated) / max(total, 1):.1f} a kill, {max(self.repeated, default=0)} at most\n"
            f"set aside        {self.set_aside} checkpoints"
        )


def campaign(folder: Path, kills: int, seed: int, tell: bool = False) -> Tally:
    """Kill processes the given number of times and compare every killed run with the uninterrupted one.

    Raises:
        AssertionError: a run could not be restarted after a kill.
    """
    dice, tally = random.Random(seed), Tally()
    (folder / "text.txt").write_text(TEXT)
    started = time.monotonic()
    straight = _start(folder, "straight", False, 0)
    straight.join()
    out, err = (Path(folder / f"straight.{stream}").read_text() for stream in ("out", "err"))
    assert straight.exitcode == 0, err
    events, duration = int(err.rsplit("events ", 1)[1]), time.monotonic() - started
    while tally.kills.total() < kills:
        name = f"run{tally.runs}"
        always = dice.choice((False, True))
        while True:
            left = kills - tally.kills.total()
            aim = dice.choice(AIMS) if left else "nothing"
            event = dice.randint(1, dice.choice((FEW, events // 2))) if aim == "file" else 0
            process = _start(folder, name, always, event)
            _aim(process, aim, folder / name, dice, duration)
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL, f"{tally}\n{(folder / f'{name}.err').read_text()}"
            tally.kills[aim] += 1
            last = max(checkpoints(folder / name / "checkpoints"), default=None)
            tally.from_start += last is None
            tally.repeated.append(_done(folder / name) - (last or 0))
            if tell:
                print(f"kill {tally.kills.total():3} ({aim}): {tally.repeated[-1]} steps to repeat", flush=True)
        tally.runs += 1
        tally.survived = tally.kills.total()
        tally.set_aside += len(list((folder / name / "checkpoints").glob("*.damaged*")))
        different = differences(folder / "straight", folder / name)
        last_out, last_err = (Path(folder / f"{name}.{stream}").read_text() for stream in ("out", "err"))
        # A process killed after its last checkpoint leaves no work to resume.
        complete = "already at 32/32" in last_err or _sample(out) == _sample(last_out)
        different += [] if complete else ["the sample"]
        tally.identical += not different
        if tell:
            print(
                f"run {tally.runs}: {'identical' if not different else 'DIFFERENT: ' + ', '.join(different)}",
                flush=True,
            )
    return tally


def differences(a: Path, b: Path) -> list[str]:
    """Return the differences between two finished runs, ignoring times."""
    found = []
    if (a / "config.json").read_bytes() != (b / "config.json").read_bytes():
        found.append("config.json")
    if comparable(a) != comparable(b):
        found.append("metrics.jsonl")
    kept, others = ({s: i.val_loss for s, i in checkpoints(run / "checkpoints").items()} for run in (a, b))
    if kept != others:
        return [*found, "which checkpoints are kept"]
    abstract = build(Run(a).config()).abstract_state
    for step in kept:
        one, other = (restore(run / "checkpoints", step, abstract) for run in (a, b))
        pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
        found += [f"{step}: {path}" for (path, x), y in pairs if np.asarray(x).tobytes() != np.asarray(y).tobytes()]
    names = {p.name for p in b.rglob("*") if not p.is_relative_to(b / "checkpoints")} | {"checkpoints"}
    drawn = {"loss.png", "baselines.json"}  # missing if a process is killed after its last checkpoint
    return found + sorted((names ^ {p.name for p in a.iterdir()}) - drawn)


def _start(folder: Path, name: str, always: bool, kill_at_event: int) -> BaseProcess:
    """Start as the scheduler's script does: with `--resume` always, or only if the folder exists."""
    command = ["shakespeare", "--out", name, *FLAGS]
    if always:
        command += ["--resume"]
    elif (folder / name / "config.json").exists():
        command = ["--resume", "--out", name]
    # Fork from a process that has imported everything and started no backend: imports take a third of the time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "jaxgpt.cli.train", "jaxgpt.cli.report", "jaxgpt.study.plot"])
    process = context.Process(target=_child, args=(folder, name, kill_at_event, ["train", *command]))
    process.start()
    return process


def _aim(process: BaseProcess, aim: str, run: Path, dice: random.Random, duration: float) -> None:
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


def _wait(process: BaseProcess, condition) -> None:  # type: ignore[no-untyped-def]
    while process.is_alive() and not condition():
        time.sleep(0.001)


def _sleep(process: BaseProcess, seconds: float) -> None:
    end = time.monotonic() + seconds
    _wait(process, lambda: time.monotonic() > end)


def _done(run: Path) -> int:
    """Return the number of steps whose metrics are written."""
    path = run / "metrics.jsonl"
    return max((int(m["step"]) + 1 for m in read_metrics(path) if "loss" in m), default=0) if path.is_file() else 0


def _sample(out: str) -> str:
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = campaign(Path(place), options.kills, options.seed, tell=True)
    print(result)
    sys.exit(result.identical < result.runs)
