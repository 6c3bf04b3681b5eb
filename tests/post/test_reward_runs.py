"""Runs with rewards from the command line: learning, resume, failing rewards, evaluation, errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import flags, jaxgpt
from test_lm import tiny

from jaxgpt import load, save
from jaxgpt.checkpoint.index import read_checkpoints
from jaxgpt.checkpoint.run import Run
from jaxgpt.convert.card.card import CardSubject, model_card
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.directories import RUN_FILES
from jaxgpt.errors import UserError
from jaxgpt.lm.results import Generation
from jaxgpt.post.answers import sample
from jaxgpt.post.sampler_check import check_sampler
from jaxgpt.trainer.metrics import read_metrics

LETTERS = "abcdefghijklmnopqrstuvwxyz?"
SETTINGS = flags(
    data__path="prompts.jsonl",
    data__window=10,
    post__objective="grpo",
    post__max_new_tokens=4,
    train__steps=80,
    train__batch_size=32,
    train__steps_per_call=4,
    post__rollout_epochs=2,
    post__kl=0.001,
    train__eval_every=40,
    train__log_every=1,
    train__sample_tokens=0,
    optim__learning_rate=0.02,
    optim__warmup_steps=2,
    optim__decay_steps=80,
    mesh__data=1,
)
OWN = ["--post.reward", "my_reward.py:vowels"]
CODE = """
from pathlib import Path

def vowels(prompts, texts, records):
    if Path("fail").exists():
        calls = len(Path("fail").read_text())
        Path("fail").write_text("x" * (calls + 1))
        if calls == 2:
            raise RuntimeError("no more")
    return [sum(c in "aeiou" for c in text) / 4 for text in texts]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with random weights, prompts, a reward, and a run with it."""
    home = tmp_path_factory.mktemp("rewards")
    save(tiny(CharTokenizer([*LETTERS]), std=0.2, block_size=32, n_embd=16, positions="rope"), home / "base")
    lines = [json.dumps({"prompt": f"{a}{b}?", "answer": a}) for a in "abcdefgh" for b in "abcdefgh"]
    (home / "prompts.jsonl").write_text("\n".join(lines))
    (home / "my_reward.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train("run", *OWN)
    return home


@pytest.fixture(autouse=True)
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the home."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(out: str, *settings: str) -> str:
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", out, *SETTINGS, *settings)
    assert result.code == 0, result.err
    return result.out


def lines(run: str, name: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(Path(run) / "metrics.jsonl") if name in line]


def samples(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "samples.jsonl").read_text().splitlines()]


def bits(run: str) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(load(run, "last").params)]


def error(*words: str, code: int = 2) -> str:
    result = jaxgpt(*words)
    assert result.code == code, result.err
    return result.err.splitlines()[-1]


def test_the_run_knows_its_files() -> None:
    """Other files in its directory would be kept by --overwrite, and be read as text if the run is inside its data."""
    assert {path.name for path in Path("run").iterdir() if not path.name.startswith(".")} <= {*RUN_FILES}


def test_a_run_learns_the_reward() -> None:
    """At first, policy and reference are equal; about a fifth of the letters are vowels."""
    metrics = lines("run", "reward")
    assert metrics[0]["clipped"] == 0.0
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[0]["reward"] < 0.35
    assert metrics[-1]["reward"] > 0.6
    assert metrics[-1]["kl"] > 0.01
    last = lines("run", "val_reward")[-1]
    assert last["val_reward"] > 0.7

    written = [sample for sample in samples("run") if sample["step"] == 80]
    assert np.mean([sample["reward"] for sample in written]) == pytest.approx(last["val_reward"])
    assert all(sample["reward"] == sum(c in "aeiou" for c in sample["answer"]) / 4 for sample in written)
    assert "reward 0." in jaxgpt("info", "run").out or "reward 1." in jaxgpt("info", "run").out

    infos, _ = read_checkpoints(Run(Path("run")).checkpoints)
    card = model_card(CardSubject(Path("run"), infos[80], Run(Path("run")).config(), "run", "jaxgpt export run out"))
    assert "The mean reward (my_reward.py:vowels) of the answers to held-out prompts is " in card

    assert jaxgpt("plot", "run", "--out", "loss.png").code == 0
    assert "data report does not describe prompts" in error("data", "report", "run")

    found = jaxgpt("eval", "run", *OWN, "--json").json
    assert found["reward"] == pytest.approx(last["val_reward"])
    assert found["prompts"] == 7
    assert jaxgpt("eval", "run", "--post.reward", "exact", "--json").json["reward"] == 0.0
    assert "--weights int8 has no effect on rewards" in jaxgpt("eval", "run", *OWN, "--weights", "int8").err
    Path("text.txt").write_text("thebase?" * 20)
    assert "perplexity" in jaxgpt("eval", "run", "--data.path", "text.txt", "--json").json


def test_a_failing_reward_saves_the_run_which_resumes_in_every_bit() -> None:
    """The reward fails in the third rollout, after sampling and before the update."""
    Path("fail").write_text("")
    start = ["train", "finetune", "--init-from", "base", "--out", "cut", *SETTINGS, *OWN]
    message = error(*start, code=1)
    assert "the reward my_reward.py:vowels failed: RuntimeError: no more" in message
    assert "resume with: jaxgpt train --resume --out cut --post.reward=my_reward.py:vowels" in message
    assert max(int(path.name) for path in Path("cut/checkpoints").iterdir()) == 8
    Path("fail").unlink()

    again = ["train", "--resume", "--out", "cut"]
    assert "which is Python code: to run it, add --post.reward my_reward.py:vowels" in error(*again)
    assert "which is Python code" in error("eval", "run")
    assert jaxgpt(*again, *OWN).code == 0
    assert bits("cut") == bits("run")
    assert samples("cut") == samples("run")


@pytest.mark.parametrize(
    "mesh",
    [
        ["--mesh.data", "2"],
        pytest.param(["--mesh.context", "2", "--data.window", "12"], marks=pytest.mark.ci),
    ],
)
def test_sampler_and_training_compute_the_same_probabilities(mesh: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ratio of a rollout is 1: log probabilities of drawn tokens differ by float32 rounding.

    The answers to one prompt are checked, here all 64.
    """
    differences = []

    def check(difference_BT: np.ndarray, dtype: str) -> None:
        assert dtype == "float32"
        assert len(difference_BT) == 64, "all answers"
        assert (difference_BT > 0).any()
        differences.append(difference_BT.max())

    monkeypatch.setattr("jaxgpt.post.rollouts.check_sampler", check)
    train("short", *OWN, "--train.steps", "4", "--train.eval-every", "4", "--post.group", "64", *mesh)
    assert len(differences) == 1
    assert max(differences) < 1e-5


def shift_log_p(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """Let the sampler return log probabilities that are too low by `nats`."""

    def shifted(*args: Any) -> list[Generation]:
        return [answer._replace(log_p=np.array(answer.log_p) - nats) for answer in sample(*args)]

    monkeypatch.setattr("jaxgpt.post.rollouts.sample", shifted)


@pytest.mark.ci
def test_a_run_in_bfloat16_records_the_rounding_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective uses the probabilities of training, so the first ratio is 1."""
    shift_log_p(monkeypatch, 0.5)
    train("low", *OWN, "--train.compute-dtype", "bfloat16", "--train.steps", "4", "--train.eval-every", "4")
    first = lines("low", "reward")[0]
    assert first["log_p_difference"] == pytest.approx(0.5, abs=0.05)
    assert first["clipped"] == 0


@pytest.mark.ci
def test_a_sampler_with_different_probabilities_ends_a_run_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    shift_log_p(monkeypatch, 0.5)
    short = ["--train.steps", "4", "--train.eval-every", "4"]
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", "wrong", *SETTINGS, *OWN, *short)
    assert result.code != 0
    assert "differ by 0.5 nats between the sampler and training" in result.err.splitlines()[-1]


@pytest.mark.ci
def test_the_first_rollout_of_adapters_is_the_rollout_of_their_base() -> None:
    """New adapters have no effect, and the reference is their base."""
    settings = flags(lora__rank=4, lora__targets="all-linear", train__steps=8, train__eval_every=8)
    train("lora", *OWN, *settings)
    first = lines("lora", "reward")[0]
    expected = lines("run", "reward")[0]
    for name in ("reward", "answer_tokens", "loss"):
        assert first[name] == pytest.approx(expected[name], abs=1e-5)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines("lora", "reward")[-1]["kl"] > 1e-6
    assert jaxgpt("eval", "lora", *OWN).code == 0


@pytest.mark.ci
def test_several_rewards_with_weights() -> None:
    """Advantages and the ranking use the sum; each reward is a metric."""
    given = ["--post.reward", "my_reward.py:vowels=1", "regex:^a=-0.5"]
    train("sum", *given, "--train.steps", "8", "--train.eval-every", "8")
    line = lines("sum", "reward")[0]
    expected = line["reward_my_reward.py:vowels"] - 0.5 * line["reward_regex:^a"]
    assert line["reward"] == pytest.approx(expected, abs=1e-6)
    assert line["reward_regex:^a"] > 0
    last = lines("sum", "val_reward")[-1]
    expected = last["val_reward_my_reward.py:vowels"] - 0.5 * last["val_reward_regex:^a"]
    assert last["val_reward"] == pytest.approx(expected, abs=1e-6)
    for each in samples("sum"):
        assert each["reward"] == each["reward_my_reward.py:vowels"] - 0.5 * each["reward_regex:^a"]

    assert "add --post.reward my_reward.py:vowels=1 'regex:^a=-0.5'" in error("eval", "sum")
    found = jaxgpt("eval", "sum", *given, "--json").json
    assert found["reward_regex:^a"] == pytest.approx(last["val_reward_regex:^a"])
    assert jaxgpt("eval", "sum", "--post.reward", "exact", "--json").json["reward"] == 0.0
    resumed = jaxgpt("train", "--resume", "--out", "sum", *given, "--train.steps", "12", "--train.eval-every", "4")
    assert resumed.code == 0, resumed.err


@pytest.mark.long
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_two_processes_equal_two_devices(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 rewards all answers. With data, each process answers half of the prompts; 15 prompts are no multiple of 2."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    own = flags(train__steps=8, train__eval_every=4, train__batch_size=60, post__group=4, post__rollout_epochs=4)
    own += ["--mesh.data", "1", f"--mesh.{axis}", "2", "--optim.learning-rate", "0.001"]
    train("one", *OWN, *own)
    words = ["launch", "--processes", "2", "--devices-per-process", "1", "train", "finetune", "--init-from", "base"]
    command = [sys.executable, "-m", "jaxgpt", *words, "--out", "two", *SETTINGS, *OWN, *own]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr

    assert [line["answer"] for line in samples("two")] == [line["answer"] for line in samples("one")]
    for name in ("loss", "reward", "answer_tokens", "kl", "clipped", "val_reward"):
        one, two = ([line[name] for line in lines(run, name)] for run in ("one", "two"))
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_a_reward_that_fails_saves_the_run_of_both_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    Path("fail").write_text("")
    words = ["launch", "--processes", "2", "--devices-per-process", "1", "train", "finetune", "--init-from", "base"]
    command = [sys.executable, "-m", "jaxgpt", *words, "--out", "two", *SETTINGS, *OWN, "--mesh.data", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("the reward my_reward.py:vowels failed: RuntimeError: no more") == 1
    assert "resume with: jaxgpt train --resume --out two --post.reward=my_reward.py:vowels" in result.stderr
    assert max(int(path.name) for path in Path("two/checkpoints").iterdir()) == 8


@pytest.mark.long
def test_a_process_that_is_killed_in_a_rollout_ends_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process waits for the shards of the killed process. The line has the command that resumes the run."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    words = ["launch", "--processes", "2", "--devices-per-process", "1", "train", "finetune", "--init-from", "base"]
    long = flags(train__steps=4000, optim__decay_steps=4000, mesh__fsdp=2, train__log_every=4)
    command = [sys.executable, "-m", "jaxgpt", *words, "--out", "two", *SETTINGS, *OWN, *long]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        end = time.monotonic() + 200
        while not (Path("two/metrics.jsonl").is_file() and lines("two", "reward")):
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "process 1 was killed by SIGKILL" in err
    assert "resume with: jaxgpt" in err
    assert "Traceback" not in err


WRONG = {
    "no reward": ([], "post.objective grpo needs a reward: add --post.reward"),
    "epochs": (["--post.reward", "json", "--post.rollout-epochs", "3"], "must be a multiple of post.rollout_epochs 3"),
    "group": (["--post.reward", "json", "--post.group", "7"], "must be a multiple of post.group 7"),
    "steps": (
        ["--post.reward", "json", "--train.steps", "41"],
        "train.steps 41 must be a multiple of train.steps_per_call 4",
    ),
    "dropout": (["--post.reward", "json", "--model.dropout", "0.1"], "model.dropout does not apply to rollouts"),
    "field": (
        ["--post.reward", "exact:target"],
        "prompts.jsonl, line 1: no field 'target' with the expected answer of the reward exact:target: the fields are ",
    ),
    "unknown": (["--post.reward", "jsn"], "post.reward 'jsn' is unknown (did you mean json?)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name: str) -> None:
    given, said = WRONG[name]
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", "new", *SETTINGS, *given)
    assert result.code == 2
    assert said in result.err.splitlines()[-1]
    assert not Path("new").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_probabilities_end_the_run(value: float, dtype: str) -> None:
    with pytest.raises(UserError, match="not finite: training has diverged"):
        check_sampler(np.array([[0.0, value]]), dtype)
