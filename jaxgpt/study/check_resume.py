"""Check that a resumed run equals an uninterrupted one, bit for bit, with a new process for each leg."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.base import checksum
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.checkpoint.store import latest_valid
from jaxgpt.config import Config, UserError, from_json
from jaxgpt.data import Batches, open_data
from jaxgpt.errors import TrainingFailed
from jaxgpt.ops.random import named_key
from jaxgpt.trainer.loop import Reporter, fit
from jaxgpt.trainer.metrics import TIMES, read_metrics
from jaxgpt.trainer.program import build


def check_resume(config: Config, cut: int) -> dict[str, tuple[str, str]]:
    """Train twice, without interruption and with one after `cut` steps, and hash the final states.

    Returns:
        Two SHA-256 hashes, uninterrupted and resumed, for each part of the state and for the inputs of the next step.

    Raises:
        UserError, TrainingFailed: a leg failed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        straight = run_leg(place, {"config": asdict(config), "out": "straight", "resume": False, "until": None})
        run_leg(place, {"config": asdict(config), "out": "cut", "resume": False, "until": cut})
        resumed = run_leg(place, {"config": asdict(config), "out": "cut", "resume": True, "until": None})
    return {name: (straight[name], resumed[name]) for name in straight}


def run_leg(place: Path, job: dict[str, Any]) -> dict[str, str]:
    """Run one leg in a new process, which reads its job from a file and prints hashes as JSON."""
    file = place / "job.json"
    file.write_text(json.dumps(job | {"out": str(place / job["out"])}))
    command = [sys.executable, "-m", "jaxgpt", "prove-resume", "--leg", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        failure = UserError if done.returncode == 2 else TrainingFailed
        raise failure(lines[-1].removeprefix("jaxgpt: "))
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def leg(file: Path) -> dict[str, str]:
    """Train as `jaxgpt train` would, with the settings of a job, and hash the final state."""
    job = json.loads(file.read_text())
    config, run = from_json(json.dumps(job["config"])), Run(Path(job["out"]))
    data = open_data(config, run.tokenizer() if job["resume"] else None)
    config = config if config.model.vocab_size else config.with_model(vocab_size=data.tokenizer.vocab_size)
    run.path.mkdir(exist_ok=True)
    write_settings(run, config, data.tokenizer)
    program = build(config)
    silent = Reporter()
    last = latest_valid(run.checkpoints, config, silent.note) if job["resume"] else None
    state = fit(program, data, run, silent, last, None, job["until"]).state
    step = int(state.step)
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(run.metrics)]
    parts = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "average": state.ema,
        "dropout key": jax.random.key_data(named_key(config.train.seed, "dropout", step)),
        "next batch": Batches.of(config, data.train).at(step)[:],
    }
    hashes = {name: checksum(tree) for name, tree in parts.items() if tree is not None}
    return hashes | {"metrics": hashlib.sha256(json.dumps(lines).encode()).hexdigest()}
