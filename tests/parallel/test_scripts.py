"""The files of examples/cluster restart a stopped run until it is finished, with stand-ins for the cluster.

docs/machines.md shows these files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import TEXT, parsed, repository

ROOT = repository()
CLUSTER = ROOT / "examples" / "cluster"
# Takes the arguments of a file, and trains a small model instead. The first two calls are stopped after two steps.
JAXGPT = """#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path
Path("arguments").write_text(json.dumps(sys.argv[1:]))
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


def shell(script: str) -> int:
    """Run a script in the current directory with the stand-ins."""
    Path("bin").mkdir(exist_ok=True)
    for name, text in {"jaxgpt": JAXGPT.format(python=sys.executable), "srun": SRUN, "scontrol": SCONTROL}.items():
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    paths = {"PATH": f"{Path('bin').resolve()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7"}
    paths |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    return subprocess.run(["bash", "-c", script], env=os.environ | paths, check=False, timeout=300).returncode


def run_loop() -> int:
    return shell((CLUSTER / "loop.sh").read_text())


def run_slurm() -> int:
    """Rerun a batch job whenever it is requeued, as Slurm does."""
    script = (CLUSTER / "slurm.sh").read_text()
    code = shell(script)
    while Path("requeued").exists():
        assert code == 75
        Path("requeued").unlink()
        code = shell(script)
    return code


def run_jobset() -> int:
    """Restart a failed job, as a JobSet does."""
    spec = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())["spec"]
    [slices] = spec["replicatedJobs"]
    [container] = slices["template"]["spec"]["template"]["spec"]["containers"]
    program, option, script = container["command"]
    assert (program, option) == ("sh", "-c")
    for _ in range(1 + spec["failurePolicy"]["maxRestarts"]):
        if shell(script) == 0:
            return 0
    return 1


def run_sky() -> int:
    """Restart a managed job after the exit codes that it names, as SkyPilot does."""
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    code = shell(task["run"])
    while code in task["resources"]["job_recovery"]["recover_on_exit_codes"]:
        code = shell(task["run"])
    return code


@pytest.mark.ci
@pytest.mark.parametrize(
    "script", [run_loop, *(pytest.param(each, marks=pytest.mark.long) for each in (run_slurm, run_jobset, run_sky))]
)
def test_a_script_continues_until_the_run_is_finished(script: object) -> None:
    Path("text.txt").write_text(TEXT)
    code = script()  # type: ignore[operator]
    assert Path("calls").read_text() == "3"
    assert list(Path("run/checkpoints").glob("600"))
    assert code == 0
    _, *arguments = json.loads(Path("arguments").read_text())
    assert parsed("train", *arguments)["resume"]
