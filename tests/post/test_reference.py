"""Laws of the reference of preference pairs: computed once, or at every step, it gives the same training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import flags, jaxgpt
from test_lm import tiny

from jaxgpt import load, save
from jaxgpt.cli.train import REFERENCE_STAGE
from jaxgpt.config import Config, DataConfig, LoraConfig, MeshConfig, PostConfig, TrainConfig
from jaxgpt.data import Batches, Windows, open_data
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.errors import UNFINISHED
from jaxgpt.model import GPT
from jaxgpt.post.preference import preference_objective
from jaxgpt.post.reference import reference_log_p
from jaxgpt.post.reference_once import BuildBesideReference, ReferencedFeeds
from jaxgpt.post.referenced_pairs import ReferencedPairs
from jaxgpt.post.start import build_program
from jaxgpt.post.used_pairs import first_uses
from jaxgpt.trainer.events import StageProgress
from jaxgpt.trainer.metrics import read_metrics

LETTERS = "abcdefghijklmnopqrstuvwxyz?"
PAIRS = 50
STEPS = 12
SETTINGS = flags(
    data__window=16,
    post__objective="dpo",
    train__steps=STEPS,
    train__batch_size=8,
    train__eval_every=4,
    train__log_every=1,
    optim__learning_rate=0.003,
    optim__decay_steps=STEPS,
    mesh__data=1,
)
PATH = ["--data.path", "pairs.jsonl"]
WAYS = ("once", "every-step")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with random weights, and two files of pairs of unequal lengths."""
    home = tmp_path_factory.mktemp("reference")
    save(tiny(CharTokenizer([*LETTERS]), block_size=32, n_embd=16, positions="rope"), home / "base")
    rng = np.random.default_rng(0)

    def text(length: int) -> str:
        return "".join(rng.choice([*LETTERS[:26]], length))

    for name, count in (("pairs.jsonl", PAIRS), ("others.jsonl", 20)):
        records = []
        for _ in range(count):
            answers = {"chosen": text(rng.integers(2, 7)), "rejected": text(rng.integers(2, 7))}
            records.append(json.dumps({"prompt": f"{text(rng.integers(2, 6))}?", **answers}))
        (home / name).write_text("\n".join(records))
    return home


@pytest.fixture(autouse=True)
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the home."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(out: str, *settings: str) -> str:
    data = [] if "--data.mix" in settings else PATH
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", out, *data, *SETTINGS, *settings)
    assert result.code == 0, result.err
    return result.out


def metrics(run: str) -> list[Mapping[str, float]]:
    """Return the numbers of a run that do not depend on time."""
    timed = ("seconds", "per_second", "mfu", "memory", "rss")
    rows = []
    for line in read_metrics(Path(run) / "metrics.jsonl"):
        names = [name for name, value in line.items() if isinstance(value, int | float)]
        rows.append({name: line[name] for name in names if not any(word in name for word in timed)})
    return rows


def bits(run: str) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(load(run, "last").params)]


def small_config(**post: Any) -> Config:
    base = load("base").config
    return Config(
        model=base.model,
        data=DataConfig(path="pairs.jsonl", window=16),
        train=TrainConfig(batch_size=8, steps=STEPS, eval_every=4),
        post=PostConfig(objective="dpo", **post),
        mesh=MeshConfig(data=1),
        init_from="base",
    )


def test_gradients_are_equal() -> None:
    """A batch has equal losses, gradients and metrics with and without the log probabilities of the reference."""
    lm = load("base")
    model = GPT(lm.config.model)
    frozen = tiny(lm.tokenizer, seed=1, block_size=32, n_embd=16, positions="rope").params
    data = open_data(small_config(), lm.tokenizer)
    windows_B2T3 = data.train.windows(np.arange(8), 16)
    log_p_B2 = reference_log_p(model.apply, 0, frozen, windows_B2T3)
    objective = preference_objective(model.apply, PostConfig(objective="dpo"), chunk=5)

    def loss(params: Any, batch: Any, frozen: Any) -> Any:
        sums = objective(params, batch, None, frozen)
        return sums.loss_B.sum(), sums

    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    every_step = compute(lm.params, windows_B2T3, frozen)
    once = compute(lm.params, {"windows": windows_B2T3, "reference_log_p": log_p_B2}, ())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), once, every_step)
    (_, sums), _ = once
    assert float(np.abs(sums.others["margin"]).min()) > 0


@pytest.mark.parametrize(
    ("lora", "objective", "computed", "once"),
    [
        (0, "dpo", "auto", True),
        (4, "dpo", "auto", False),
        (4, "ipo", "once", True),
        (0, "robust", "every-step", False),
        (0, "simpo", "auto", False),
        (0, "next-token", "auto", False),
    ],
)
def test_when_the_reference_is_computed(lora: int, objective: str, computed: str, once: bool) -> None:
    post = PostConfig(objective=objective, reference_log_p=computed)  # type: ignore[arg-type]
    assert Config(lora=LoraConfig(rank=lora), post=post).computes_reference_once == once


def test_objectives_without_a_reference_reject_the_setting() -> None:
    settings = [*PATH, *SETTINGS, "--post.objective", "simpo", "--post.reference-log-p", "once"]
    result = jaxgpt("train", "finetune", "--init-from", "base", *settings)
    assert result.code == 2
    assert "post.reference_log_p has no effect on post.objective simpo" in result.err


def test_training_holds_no_copy_of_the_reference() -> None:
    config = small_config()
    lm = load("base")
    data = open_data(config, lm.tokenizer)
    build = BuildBesideReference(build_program)
    program = build(config, frozen=lm.params)
    assert program.frozen == ()
    feed = ReferencedFeeds(build)(program, data, None)
    assert build.reference is None
    [_, batch] = feed.at(range(2))
    windows_B2T3 = batch[:]["windows"]
    expected_B2 = jax.jit(lambda *args: reference_log_p(GPT(config.model).apply, 0, *args))(lm.params, windows_B2T3)
    np.testing.assert_allclose(batch[:]["reference_log_p"], expected_B2, rtol=1e-5)


def test_pairs_are_found_by_their_starts() -> None:
    """Starts have gaps, like the starts of mixtures."""
    data = open_data(small_config(), load("base").tokenizer)
    log_p_N2 = np.arange(6, dtype=np.float32).reshape(3, 2)
    pairs = ReferencedPairs(data.train, np.array([2, 5, 30]), log_p_N2)
    rows = Windows(pairs, np.array([30, 2, 30]), 16)[:]
    np.testing.assert_array_equal(rows["reference_log_p"], log_p_N2[[2, 0, 2]])
    np.testing.assert_array_equal(rows["windows"], data.train.windows(np.array([30, 2, 30]), 16))


@pytest.mark.parametrize("start", [0, 3, 31])
def test_pairs_without_log_probabilities_are_not_found(start: int) -> None:
    data = open_data(small_config(), load("base").tokenizer)
    pairs = ReferencedPairs(data.train, np.array([2, 5, 30]), np.zeros((3, 2), np.float32))
    with pytest.raises(AssertionError, match="a pair without log probabilities"):
        pairs.windows(np.array([5, start]), 16)


def test_a_batch_is_found_without_reading_all_starts() -> None:
    """The starts of a mixture are far apart. Sorting 2^20 of them takes 0.1 seconds, and each step reads a batch."""
    data = open_data(small_config(), load("base").tokenizer)
    starts_N = np.append([2, 5], np.arange(1, 2**20) * 1000)
    pairs = ReferencedPairs(data.train, starts_N, np.zeros((len(starts_N), 2), np.float32))
    begin = time.process_time()
    for _ in range(5):
        pairs.windows(np.full(64, 5), 16)
    assert time.process_time() - begin < 0.1


def test_the_order_of_first_uses_does_not_depend_on_the_length_of_the_run() -> None:
    data = open_data(small_config(), load("base").tokenizer)
    batches = Batches.of(small_config(), data.train)
    short, long = (first_uses(batches, range(steps)) for steps in (4, STEPS))
    assert len(short) == 32
    np.testing.assert_array_equal(long[: len(short)], short)
    assert sorted(long.tolist()) == list(range(PAIRS * 9 // 10))


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="all weights"),
        pytest.param(["--lora.rank", "4", "--optim.learning-rate", "0.01"], id="adapters"),
        pytest.param(["--mesh.data", "2", "--mesh.fsdp", "2", "--train.accumulation", "2"], id="four devices"),
        pytest.param(["--train.scan-layers", "--train.steps-per-call", "4"], id="scanned layers"),
        pytest.param(["--data.mix", "pairs.jsonl=2", "others.jsonl=1"], id="mixture"),
        pytest.param(["--mesh.context", "2", "--train.batch-size", "7", "--train.loss-chunk", "6"], id="padded rows"),
    ],
)
def test_both_ways_train_equally(settings: list[str]) -> None:
    """Losses, gradient norms and metrics of all steps and evaluations are equal up to the rounding of float32."""
    for way in WAYS:
        train(way, *settings, "--post.reference-log-p", way)
    once, every_step = map(metrics, WAYS)
    assert len(once) == len(every_step) > STEPS
    for a, b in zip(once, every_step, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=2e-5, atol=1e-6)
    digests = [json.loads(Path(way, "evaluation.json").read_text())["windows"] for way in WAYS]
    assert digests[0] == digests[1]


@pytest.mark.ci
@pytest.mark.parametrize("lora", [[], ["--lora.rank", "4"]])
def test_a_resumed_run_has_the_same_bits(lora: list[str]) -> None:
    """The first part uses 32 of 45 pairs; the second part computes only the microbatches of pairs that it uses."""
    once = ["--post.reference-log-p", "once", *lora]
    train("straight", *once)
    train("cut", *once, "--train.steps", "4")
    assert jaxgpt("train", "--resume", "--out", "cut", "--train.steps", str(STEPS)).code == 0
    assert bits("cut") == bits("straight")
    assert metrics("cut")[-1] == metrics("straight")[-1]


@pytest.mark.ci
def test_a_signal_stops_the_computation_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run computes no further microbatch, and takes no step; when it is resumed, it computes all of them."""
    train("straight")
    computed = []

    def stop(progress: StageProgress, done: int, total: int, detail: str = "") -> None:
        if progress.name == REFERENCE_STAGE:
            computed.append(done)
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StageProgress, "__call__", stop)
        result = jaxgpt("train", "finetune", "--init-from", "base", "--out", "cut", *PATH, *SETTINGS)
    assert result.code == UNFINISHED
    assert "stopped and saved at step 0; resume with: jaxgpt train --resume --out cut" in result.err
    assert computed == [0]
    assert jaxgpt("train", "--resume", "--out", "cut").code == 0
    assert bits("cut") == bits("straight")
    assert metrics("cut")[-1] == metrics("straight")[-1]


@pytest.mark.ci
def test_a_resumed_run_may_change_its_data() -> None:
    """After the change, the run no longer opens the earlier pairs."""
    train("run", "--train.steps", "4")
    more = ["--data.mix", "others.jsonl=1", "--train.steps", "8"]
    result = jaxgpt("train", "--resume", "--out", "run", *more)
    assert result.code == 0, result.err
    Path("pairs.jsonl").unlink()
    again = jaxgpt("train", "--resume", "--out", "run", "--train.steps", str(STEPS))
    assert again.code == 0, again.err


@pytest.mark.ci
def test_a_run_prints_when_it_computes_its_reference() -> None:
    out = train("run", "--train.steps", "1")
    assert (
        "reference: computed once for each pair, before the first step, so no copy is in memory during training" in out
    )
    out = train("lora", "--lora.rank", "4")
    assert (
        "reference: computed at every step, 2.13 times for each pair; --post.reference-log-p once computes it once"
        in out
    )


@pytest.mark.long
def test_two_processes_compute_the_same_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process reads and computes the rows of its devices, and receives the log probabilities of all."""
    train("one", "--mesh.data", "2")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    words = ["launch", "--processes", "2", "--devices-per-process", "1", "train", "finetune", "--init-from", "base"]
    command = [sys.executable, "-m", "jaxgpt", *words, "--out", "two", *PATH, *SETTINGS, "--mesh.data", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    for a, b in zip(metrics("one"), metrics("two"), strict=True):
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_of_a_run_with_an_optimizer_state_is_its_initial_weights_not_their_ema(way: str) -> None:
    """With --keep-optimizer, training starts from the parameters of the checkpoint, so rewards begin at 0."""
    ema = flags(optim__ema_decay=0.8)
    train("first", *ema)
    settings = ["--data.path", "pairs.jsonl", *SETTINGS, *ema, "--post.reference-log-p", way, "--train.steps", "2"]
    result = jaxgpt("train", "finetune", "--init-from", "first", "--keep-optimizer", "--out", "second", *settings)
    assert result.code == 0, result.err
    first_step = next(row for row in metrics("second") if "loss" in row)
    assert first_step["margin"] == first_step["reward_chosen"] == 0
    assert first_step["loss"] == pytest.approx(np.log(2))


def test_adapters_trained_with_an_optimizer_state_are_evaluated_with_the_average_of_their_base() -> None:
    """The optimizer state comes from other adapters; the base, which is the reference, is still read as its EMA."""
    train("first", *flags(optim__ema_decay=0.8))
    settings = ["--data.path", "pairs.jsonl", *SETTINGS, "--train.steps", "4"]
    result = jaxgpt("train", "finetune", "--init-from", "first", "--lora.rank", "2", "--out", "adapters", *settings)
    assert result.code == 0, result.err
    result = jaxgpt(
        "train",
        "finetune",
        "--init-from",
        "adapters",
        "--keep-optimizer",
        "--lora.rank",
        "2",
        "--out",
        "next",
        *settings,
    )
    assert result.code == 0, result.err
    found = jaxgpt("eval", "next", "--json")
    assert found.code == 0, found.err
    last = [row for row in metrics("next") if "val_loss" in row][-1]
    assert found.json["loss"] == pytest.approx(last["val_loss"], rel=1e-5)
