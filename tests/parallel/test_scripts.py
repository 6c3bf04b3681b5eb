"""The scripts of docs/machines.md restart a stopped run until it is finished, with stand-ins for the cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TEXT, repository

ROOT = repository()
PAGE = (ROOT / "docs/machines.md").read_text()
# Takes the arguments of the page, and trains a small model instead. The first two calls are stopped after two steps.
JAXGPT = """#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path
assert "--resume" in sys.argv, sys.argv
calls, metrics = Path("calls"), Path("run/metrics.jsonl")
number = int(calls.read_text()) if calls.exists() else 0
calls.write_text(str(number + 1))
command = "train python-char --resume --out run --data.path text.txt --model.n-layer 1 --model.n-embd 16 --model.n-head 2"
command += " --model.block-size 16 --train.batch-size 2 --train.steps 600 --train.eval-every 600 --train.log-every 1"
command += " --mesh.data 1 --train.sample-tokens 0"
lines = lambda: len(metrics.read_text().splitlines()) if metrics.exists() else 0
last = lines() + 2
process = subprocess.Popen([sys.executable, "-m", "jaxgpt", *command.split()])
while number < 2 and process.poll() is None:
    if lines() >= last:
        process.send_signal(signal.SIGTERM)
        break
    time.sleep(0.01)
sys.exit(process.wait())
"""
SRUN = """#!/bin/sh
while [ "$1" != jaxgpt ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
[ "$*" = "requeue 7" ] && touch requeued
"""


def block(start: str) -> str:
    """Return the block of the page that follows a text."""
    found = re.search(r"```\w+\n(.*?)```", PAGE[PAGE.index(start) :], flags=re.S)
    assert found
    return found[1]


def shell(script: str) -> int:
    """Run a script in the current directory with the stand-ins."""
    Path("bin").mkdir(exist_ok=True)
    for name, text in {"jaxgpt": JAXGPT.format(python=sys.executable), "srun": SRUN, "scontrol": SCONTROL}.items():
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    paths = {"PATH": f"{Path('bin').resolve()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", "-c", script], env=os.environ | paths, check=False, timeout=300).returncode


def run_loop() -> int:
    return shell(block("On one machine, run this loop"))


def run_slurm() -> int:
    """Rerun a batch job whenever it is requeued, as Slurm does."""
    code = shell(block("Under Slurm, this script"))
    while Path("requeued").exists():
        assert code == 75
        Path("requeued").unlink()
        code = shell(block("Under Slurm, this script"))
    return code


def run_jobset() -> int:
    """Restart a failed job, as a JobSet does."""
    text = block("On GKE, use a JobSet")
    [command] = re.findall(r'command: \[sh, -c, "(.*?)"\]', text, flags=re.S)
    [most] = re.findall(r"maxRestarts: (\d+)", text)
    return next((0 for _ in range(1 + int(most)) if shell(" ".join(command.split())) == 0), 1)


@pytest.mark.ci
@pytest.mark.parametrize(
    "script", [run_loop, *(pytest.param(each, marks=pytest.mark.long) for each in (run_slurm, run_jobset))]
)
def test_a_script_continues_until_the_run_is_finished(script: object) -> None:
    Path("text.txt").write_text(TEXT)
    code = script()  # type: ignore[operator]
    assert Path("calls").read_text() == "3"
    assert list(Path("run/checkpoints").glob("600"))
    assert code == 0
