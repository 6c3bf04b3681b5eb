"""Runs on preference pairs from the command line: learning, resume, adapters, meshes, evaluation, errors."""

from __future__ import annotations

import json
import math
import shutil
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
from jaxgpt.config import ModelConfig, PostConfig
from jaxgpt.convert.card.card import CardSubject, model_card
from jaxgpt.data import open_data
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.model import GPT
from jaxgpt.post.preference import preference_objective
from jaxgpt.trainer.metrics import read_metrics

LETTERS = "abcdefghijklmnopqrstuvwxyz?"
PAIRS = 240
SETTINGS = flags(
    data__path="pairs.jsonl",
    data__window=16,
    train__steps=60,
    train__batch_size=16,
    train__eval_every=30,
    train__log_every=1,
    optim__learning_rate=0.003,
    optim__decay_steps=60,
    mesh__data=1,
)
DPO = ["--post.objective", "dpo"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with random weights, pairs, and runs on them. The chosen answers hold vowels, the rejected answers do not."""
    home = tmp_path_factory.mktemp("preferences")
    save(tiny(CharTokenizer([*LETTERS]), block_size=32, n_embd=16, positions="rope"), home / "base")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(PAIRS):
        prompt, chosen, rejected = ("".join(rng.choice([*letters], 4)) for letters in (LETTERS[:26], "aeiou", "bcdfg"))
        lines.append(json.dumps({"prompt": f"{prompt}?", "chosen": chosen, "rejected": rejected}))
    (home / "pairs.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train("dpo", *DPO)
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


def lines(run: str, name: str) -> list[dict]:
    return [line for line in read_metrics(Path(run) / "metrics.jsonl") if name in line]


def bits(run: str) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(load(run, "last").params)]


def error(*words: str) -> str:
    result = jaxgpt(*words)
    assert result.code == 2, result.err
    assert result.err.count("\n") == 1
    return result.err


def test_a_run_learns_the_preference() -> None:
    """Policy and reference are equal at first, so the loss is log 2, and no reward is higher than the other."""
    first = lines("dpo", "loss")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == first["accuracy"] == 0.0
    last = lines("dpo", "val_loss")[-1]
    assert last["val_windows"] == PAIRS // 10
    assert last["val_accuracy"] > 0.9
    assert last["val_margin"] == pytest.approx(last["val_reward_chosen"] - last["val_reward_rejected"], abs=1e-5)

    found = jaxgpt("eval", "dpo", "--json").json
    assert (found["pairs"], found["objective"]) == (PAIRS // 10, "dpo")
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(last["val_accuracy"])
    assert "tokens" not in found
    assert "perplexity" not in found


def test_the_base_has_no_preference() -> None:
    """Without training, about half of the chosen answers are more probable than the rejected answers."""
    lm = load("base")
    objective = jax.jit(preference_objective(GPT(lm.config.model).apply, PostConfig(objective="simpo")))
    data = open_data(load("dpo").config, lm.tokenizer)
    rows = data.train.windows(np.arange(PAIRS // 2), 16)
    accuracy = float(np.mean(objective(lm.params, rows, None, ()).others["accuracy"]))
    assert 0.25 < accuracy < 0.75


def test_two_texts_are_counted() -> None:
    assert lines("dpo", "loss")[-1]["tokens"] == 60 * 16 * 2 * 16
    infos, _ = read_checkpoints(Run(Path("dpo")).checkpoints)
    assert infos[60].tokens == 60 * 16 * 2 * 16
    out = train("short", *DPO, "--train.steps", "1")
    assert "1 steps of 16 pairs x 2 x 16 tokens: 0.0741 epochs" in out
    assert "objective: dpo, beta 0.1, reference: the initial weights; loss without a preference: 0.6931" in out
    assert "step     1: validation loss 0." in out
    assert "(24 pairs)" in out


def test_a_stopped_run_resumes_in_every_bit() -> None:
    train("cut", *DPO, "--train.steps", "25", "--train.steps-per-call", "10")
    assert jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "60").code == 0
    assert bits("cut") == bits("dpo")
    losses = {line["step"]: line["loss"] for line in lines("dpo", "loss")}
    assert {line["step"]: line["loss"] for line in lines("cut", "loss")} == losses


@pytest.mark.ci
@pytest.mark.parametrize(
    "mesh", [["--mesh.data", "2", "--train.accumulation", "2"], ["--mesh.context", "2", "--train.loss-chunk", "6"]]
)
def test_two_devices_equal_one(mesh: list[str]) -> None:
    train("two", *DPO, *mesh, "--train.steps", "30")
    one, two = ([line["loss"] for line in lines(name, "loss")] for name in ("dpo", "two"))
    np.testing.assert_allclose(two, one[:30], rtol=1e-4)


@pytest.mark.ci
def test_the_reference_of_adapters_is_their_base() -> None:
    adapters = [*DPO, "--lora.rank", "4", "--lora.targets", "all-linear", "--optim.learning-rate", "0.01"]
    out = train("lora", *adapters)
    assert "reference: the frozen base" in out
    assert lines("lora", "loss")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    last = lines("lora", "val_loss")[-1]
    assert last["val_accuracy"] > 0.9
    found = jaxgpt("eval", "lora", "--json").json
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-4)
    assert found["reward_chosen"] == pytest.approx(last["val_reward_chosen"], rel=1e-3, abs=1e-4)

    train("cut", *adapters, "--train.steps", "30")
    assert jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "60").code == 0
    assert bits("cut") == bits("lora")


@pytest.mark.parametrize("objective", ["ipo", "simpo", "orpo"])
@pytest.mark.ci
def test_other_objectives_learn_the_preference(objective: str) -> None:
    beta = {"ipo": "0.1", "simpo": "2", "orpo": "1"}[objective]
    train(objective, "--post.objective", objective, "--post.beta", beta)
    assert lines(objective, "val_loss")[-1]["val_accuracy"] > 0.9
    found = jaxgpt("eval", objective, "--json").json
    assert found["loss"] == pytest.approx(lines(objective, "val_loss")[-1]["val_loss"], rel=1e-5)


def test_a_reference_of_its_own() -> None:
    """With the weights after DPO as the reference of the base, the rewards have the opposite sign."""
    train("back", *DPO, "--post.reference", "dpo", "--train.steps", "1")
    first = lines("back", "loss")[0]
    assert first["margin"] < -0.2
    assert '"reference": "' + str(Path("dpo/checkpoints/60").absolute()) in Path("back/config.json").read_text()
    assert jaxgpt("train", "--resume", "--out", "back", "--train.steps", "2").code == 0


def test_a_run_needs_its_reference() -> None:
    """The reference is found at its recorded path or next to the run; without it, nothing is written."""
    config = Path("dpo/config.json")
    recorded = json.loads(config.read_text())["init_from"]
    config.write_text(config.read_text().replace(recorded, "/nowhere/base/checkpoints/0"))
    assert jaxgpt("eval", "dpo").code == 0  # next to the run
    again = ("train", "--resume", "--out", "dpo", "--train.steps", "61")
    before = config.read_text()
    save(tiny(CharTokenizer([*LETTERS]), seed=1, block_size=32, n_embd=16, positions="rope"), "base", overwrite=True)
    different = "base/checkpoints/0 is not the base of dpo: its weights differ"
    assert different in error(*again)
    assert different in error("eval", "dpo")
    shutil.rmtree("base")
    missing = "dpo needs its reference /nowhere/base/checkpoints/0, which is missing: restore it"
    assert missing in error(*again)
    assert missing in error("eval", "dpo")
    assert config.read_text() == before
    assert jaxgpt("sample", "dpo", "--prompt", "a", "--max-new-tokens", "2").code == 0


def test_other_data_of_a_run() -> None:
    """Other pairs have the loss of the objective, and a text has the loss of language models."""
    text = Path("pairs.jsonl").read_text()
    Path("other.jsonl").write_text("\n".join(text.splitlines()[:50]))
    assert jaxgpt("eval", "dpo", "--data.path", "other.jsonl", "--json").json["pairs"] == 50
    Path("text.txt").write_text("thebase?" * 20)
    found = jaxgpt("eval", "dpo", "--data.path", "text.txt", "--json").json
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert "accuracy" not in found


def test_other_commands_read_the_run() -> None:
    assert "post.objective 'dpo'" in jaxgpt("info", "dpo").out
    assert jaxgpt("plot", "dpo", "--out", "loss.png").code == 0
    report = jaxgpt("data", "report", "dpo").out
    assert "216 training, 24 validation, 0 duplicates" in report
    assert "longest" in jaxgpt("data", "report", "pairs.jsonl", "--data.tokenizer", "base/tokenizer.json").out
    assert "bench does not support post.objective dpo: use the run of --init-from" in error("bench", "dpo")
    planned = jaxgpt("plan", "dpo", "--topology", "v5e:2x2", "--estimate")
    assert planned.code == 0, planned.err
    assert "objective  dpo" in planned.out


def test_a_model_card_has_the_loss_of_the_objective() -> None:
    run = Run(Path("dpo"))
    infos, _ = read_checkpoints(run.checkpoints)
    text = model_card(CardSubject(run.path, infos[60], run.config(), "dpo", "jaxgpt export dpo out"))
    assert "Trained with dpo. The dpo loss on held-out pairs is 0." in text
    assert "nats per token" not in text


def test_wrong_settings() -> None:
    start = ["train", "finetune", "--init-from", "base", "--out", "new", *SETTINGS]
    assert "post.objective dpo needs the weights of a run: add --init-from RUN" in error("train", "shakespeare", *DPO)
    Path("text.txt").write_text("abc" * 99)
    said = "post.objective dpo needs preference pairs (.jsonl, .json or .parquet), but text.txt holds text"
    assert said in error(*start, *DPO, "--data.path", "text.txt")
    assert "train on pairs with --post.objective dpo" in error(*start)
    assert "post.beta must be above 0" in error(*start, *DPO, "--post.beta", "0")
    assert "the frozen base is the reference" in error(*start, *DPO, "--lora.rank", "2", "--post.reference", "dpo")
    said = "a resumed run keeps post.beta: 0.1, not 0.2"
    assert said in error("train", "--resume", "--out", "dpo", "--post.beta", "0.2", "--train.steps", "70")

    save(tiny(CharTokenizer([*"abc"]), block_size=32, n_embd=16, positions="rope"), "small")
    said = "post.reference small has a vocabulary of 3, but the weights of --init-from have 27"
    assert said in error(*start, *DPO, "--post.reference", "small")
    save(tiny(CharTokenizer([*LETTERS[:-1], "!"]), block_size=32, n_embd=16, positions="rope"), "letters")
    assert "has a different tokenizer than" in error(*start, *DPO, "--post.reference", "letters")
    save(tiny(CharTokenizer([*LETTERS]), block_size=32, n_embd=16, positions="rope", rope_theta=99.0), "theta")
    assert "has model.rope_theta 99.0, but the trained model has" in error(*start, *DPO, "--post.reference", "theta")
    assert not Path("new").exists()


def test_sft_adds_the_cross_entropy_per_token_of_the_chosen_answer() -> None:
    """The answers have 1 and 3 tokens, so a division by the mean length would differ."""
    lm = tiny(CharTokenizer([*LETTERS]), block_size=8, n_embd=8, positions="rope")
    rows_B2T3 = np.zeros((2, 2, 4, 3), np.int32)
    rows_B2T3[..., 1] = -1
    for row, length in enumerate((1, 3)):
        rows_B2T3[row, :, :length, 1] = np.arange(length) + 1
    model = GPT(lm.config.model)
    plain = preference_objective(model.apply, PostConfig(objective="dpo"))(lm.params, rows_B2T3, None, lm.params)
    tuned = preference_objective(model.apply, PostConfig(objective="dpo", sft=0.5))(
        lm.params, rows_B2T3, None, lm.params
    )
    cross_entropy_B = -plain.others["log_p_chosen"] / np.array([1, 3])
    np.testing.assert_allclose(tuned.loss_B - plain.loss_B, 0.5 * cross_entropy_B, rtol=1e-5)


def test_chunks_keep_memory_flat_in_the_vocabulary() -> None:
    """With chunks of 4 of 64 positions, the logits of the two passes take less than an eighth of the memory."""

    def temporary(V: int, chunk: int) -> int:
        config = ModelConfig(vocab_size=V, block_size=64, n_layer=1, n_head=1, n_embd=8, positions="rope", bias=False)
        model = GPT(config)
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), np.zeros((1, 4), np.int32)))["params"]
        rows = jax.ShapeDtypeStruct((4, 2, 64, 3), np.int32)
        objective = preference_objective(model.apply, PostConfig(objective="dpo"), chunk)

        def loss(params: Any, rows: jax.Array, frozen: Any) -> jax.Array:
            return objective(params, rows, None, frozen).loss_B.sum()

        compiled = jax.jit(jax.grad(loss)).lower(params, rows, params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096, 4) < temporary(4096, 0) / 8
