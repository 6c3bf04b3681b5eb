"""The program as a user sees it: commands, files, exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import TEXT, flags, jaxgpt, repository

import jaxgpt as package
from jaxgpt.checkpoint.index import checkpoints as checkpoints_of
from jaxgpt.cli import main

MODEL = flags(model__n_layer=1, model__norm="none", model__mlp="none", model__n_embd=32, model__block_size=32)
TINY = MODEL + flags(train__steps=20, train__eval_every=10, train__batch_size=8, train__sample_tokens=20, mesh__data=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the shakespeare preset on a small text."""
    folder = tmp_path_factory.mktemp("product")
    (folder / "text.txt").write_text(TEXT)
    out = folder / "a run :x: #1 %20 {é} '$HOME'"
    result = jaxgpt("train", "shakespeare", "--data.path", str(folder / "text.txt"), "--out", str(out), *TINY)
    assert result.code == 0, result.err
    assert f"\nrun       {out} (" in result.out
    (folder / "next").write_text(result.out[result.out.index("\nnext ") + len("\nnext ") :])
    assert "validation loss" in result.out
    assert "seeds" in result.out
    return out


def test_a_run_directory(run: Path) -> None:
    names = "config.json tokenizer.json baselines.json metrics.jsonl evaluation.json loss.png checkpoints .lock"
    assert {p.name for p in run.iterdir()} == set(names.split())
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((run / "config.json").read_text())
    assert config["preset"] == "shakespeare"
    assert config["model"]["vocab_size"] == len(set(TEXT))


def test_the_printed_command_works(run: Path) -> None:
    words = shlex.split((run.parent / "next").read_text())
    *command, prompt = words
    assert command == ["jaxgpt", "sample", str(run), "--prompt"]
    assert prompt in TEXT
    result = jaxgpt(*words[1:])
    assert (result.code, prompt in result.out) == (0, True)


def test_eval(run: Path) -> None:
    result = jaxgpt("eval", str(run), "--checkpoint", "last", "--json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    recorded = [line for line in lines if "val_loss" in line][-1]
    assert result.json["loss"] == pytest.approx(recorded["val_loss"], rel=1e-6)
    assert result.json["stderr"] == pytest.approx(recorded["val_stderr"], rel=1e-4)
    assert result.json["bits_per_byte"] == pytest.approx(result.json["loss"] / 0.693147, rel=1e-5), (
        "one byte per character"
    )


@pytest.mark.ci
@pytest.mark.parametrize("seeds", [2, pytest.param(10, marks=pytest.mark.long)])
def test_statquest_answers_correctly_for_most_seeds(seeds: int) -> None:
    """Ask both questions, with greedy decoding."""
    right = 0
    for seed in range(seeds):
        out = f"run{seed}"
        assert (
            jaxgpt("train", "statquest", "--out", out, "--train.seed", str(seed), "--train.sample-tokens", "0").code
            == 0
        )
        lm = package.load(out)
        answers = package.generate(
            lm, ["what is statquest <EOS>", "statquest is what <EOS>"], max_new_tokens=2, temperature=0
        )
        right += all((a.text, a.finish_reason) == (" awesome", "stop") for a in answers)
    assert right >= 0.8 * seeds, f"{right} of {seeds}"


@pytest.mark.ci
def test_train_py_is_jaxgpt_train() -> None:
    result = subprocess.run(
        [sys.executable, repository() / "train.py", "statquest"], capture_output=True, text=True, check=True
    )
    assert "what is statquest <EOS> awesome\n" in result.stdout
    assert Path("runs/statquest/config.json").is_file()


@pytest.mark.ci
def test_interrupted_and_resumed() -> None:
    """Ctrl-C saves and prints the path; the run is resumed later."""
    Path("text.txt").write_text(TEXT)
    more = flags(train__steps=100_000, train__eval_every=20)
    words = ["train", "shakespeare", "--data.path", "text.txt", "--out", "run", *TINY, *more]
    command = [sys.executable, "-m", "jaxgpt", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(checkpoints_of(Path("run/checkpoints"))):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    # Meanwhile, other processes can read the run but not write to it.
    for which in ("last", "best"):
        sampled = jaxgpt("sample", "run", "--prompt", "12", "--max-new-tokens", "5", "--checkpoint", which)
        assert sampled.code == 0
        assert re.fullmatch(r"jaxgpt: sampled from run, step \d+\n", sampled.err)
    second = jaxgpt("train", "--resume", "--out", "run")
    assert second.code == 2
    assert f"run is being written by process {process.pid} on" in second.err
    assert second.err.count("\n") == 1

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "resume with: jaxgpt train --resume --out run" in err
    saved = re.search(r"saved at step (\d+);", err)
    assert saved
    step = int(saved[1])
    assert (Path("run/checkpoints") / str(step)).is_dir()

    result = jaxgpt("train", "--resume", "--out", "run", "--train.steps", str(step + 5))
    assert result.code == 0, result.err
    assert (Path("run/checkpoints") / str(step + 5)).is_dir()


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout-and-stderr"])
def test_training_continues_after_its_pipe_is_closed(both: bool) -> None:
    """Run `jaxgpt train ... | head -2`, with and without `2>&1`."""
    Path("text.txt").write_text(TEXT)
    read, write = os.pipe()
    with os.fdopen(write, "w") as closed, contextlib.ExitStack() as stack:
        os.close(read)
        err = closed if both else io.StringIO()
        stack.enter_context(contextlib.redirect_stdout(closed))
        stack.enter_context(contextlib.redirect_stderr(err))
        assert main(["train", "shakespeare", "--data.path", "text.txt", "--out", "run", *TINY]) == 0
    assert list(checkpoints_of(Path("run/checkpoints"))) == [10, 20]
    assert Path("run/loss.png").is_file()
