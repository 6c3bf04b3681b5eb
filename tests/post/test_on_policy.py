"""On-policy distillation: laws of the objective, and runs from the command line."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flags, jaxgpt
from test_distill import LETTERS, log_p, logits, model, objective_of
from test_lm import tiny

from jaxgpt import LM, load, save
from jaxgpt.checkpoint.index import read_checkpoints
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import PostConfig
from jaxgpt.convert.card.card import CardSubject, model_card
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.directories import RUN_FILES
from jaxgpt.errors import UserError
from jaxgpt.post.distill import divergence, kl_divergence
from jaxgpt.post.on_policy import on_policy_objective
from jaxgpt.trainer.metrics import read_metrics

# Prompts of 2 and 3 tokens with answers of 3 and 1 tokens, and a row of padding.
IDS = [[1, 2, 3, 4, 5], [6, 5, 4, 3]]
PROMPTS = [2, 3]
TOKENS = 4


def rollout() -> dict[str, Any]:
    windows_BT3 = np.full((3, 6, 3), (0, -1, -1), np.int32)
    for row, (ids, prompt) in enumerate(zip(IDS, PROMPTS, strict=True)):
        n = len(ids) - 1
        windows_BT3[row, :n, 0] = ids[:-1]
        windows_BT3[row, prompt - 1 : n, 1] = ids[prompt:]
        windows_BT3[row, :n, 2] = 0
    weight_B = np.array([2 / TOKENS, 2 / TOKENS, -1], np.float32)
    return {"windows": windows_BT3, "weight": weight_B, "metrics": {"truncated": np.array([1, 0, -1], np.float32)}}


@pytest.mark.parametrize("chunk", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_gradients_of_fixed_draws_equal_a_hand_written_objective(chunk: int) -> None:
    student, params = model(1, 8)
    teacher, frozen = model(2, 12)

    def by_hand(params: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the mean of KL(student || teacher) and of -log p over the positions that predict a token of an answer."""
        kl = jnp.zeros(())
        surprise = jnp.zeros(())
        for ids, prompt in zip(IDS, PROMPTS, strict=True):
            inputs = np.array([ids[:-1]])
            p = log_p(student.apply({"params": params}, inputs))[0, prompt - 1 :]
            q = log_p(teacher.apply({"params": frozen}, inputs))[0, prompt - 1 :]
            kl += (jnp.exp(p) * (p - q)).sum()
            surprise -= sum(p[t, token] for t, token in enumerate(ids[prompt:]))
        return kl / TOKENS, surprise / TOKENS

    settings = {"objective": "on-policy-distill", "divergence": "reverse", "max_new_tokens": 3}
    objective = on_policy_objective(objective_of(student, teacher, chunk, **settings))

    def by_objective(params: Any) -> tuple[jax.Array, Any]:
        sums = objective(params, rollout(), None, frozen)
        metrics = {name: x_B.sum() / sums.count_B.sum() for name, x_B in sums.others.items()}
        return sums.loss_B.sum() / sums.count_B.sum(), metrics

    (expected, entropy), slopes = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(params)
    (found, metrics), found_slopes = jax.jit(jax.value_and_grad(by_objective, has_aux=True))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), found_slopes, slopes)
    np.testing.assert_allclose(metrics["kl"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-5)
    assert metrics["answer_tokens"] == 2
    assert metrics["truncated"] == 0.5


def test_the_jensen_shannon_divergence_equals_its_definition() -> None:
    p, q = (np.exp(np.asarray(log_p(logits(seed)), np.float64)) for seed in (0, 1))
    for beta in (0.1, 0.5, 0.9):
        m = beta * q + (1 - beta) * p
        expected = beta * (q * np.log(q / m)).sum(-1) + (1 - beta) * (p * np.log(p / m)).sum(-1)
        found = divergence(log_p(logits(0)), log_p(logits(1)), "jsd", beta)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_scaled_jensen_shannon_divergence_tends_to_the_kl_divergences() -> None:
    """`JSD_b / b` tends to KL(q || p) for b = 0, and `JSD_b / (1 - b)` to KL(p || q) for b = 1 (GKD, section 2.1)."""
    p = log_p(logits(0))
    q = log_p(logits(1))
    near_0 = divergence(p, q, "jsd", 1e-3) / 1e-3
    near_1 = divergence(p, q, "jsd", 1 - 1e-3) / 1e-3
    np.testing.assert_allclose(near_0, kl_divergence(q, p), rtol=0.02)
    np.testing.assert_allclose(near_1, kl_divergence(p, q), rtol=0.02)


# `GKDTrainer.generalized_jsd_loss` of TRL 1.16, for the logits of the test.
TRL = {
    ("forward", 0.0): 1.5881575,
    ("jsd", 0.3): 0.2714924,
    ("jsd", 0.5): 0.3231185,
    ("jsd", 0.8): 0.2361903,
    ("reverse", 1.0): 2.4358363,
}


@pytest.mark.parametrize(("kind", "beta"), TRL)
def test_the_mean_divergence_equals_the_loss_of_trl(kind: str, beta: float) -> None:
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(0, 2, (2, 3, 7)).astype(np.float32) for _ in range(2))
    found = divergence(log_p(student), log_p(teacher), kind, beta).mean()
    assert float(found) == pytest.approx(TRL[kind, beta], rel=1e-5)


# Runs.

SETTINGS = flags(
    data__path="prompts.jsonl",
    data__window=12,
    post__objective="on-policy-distill",
    post__reference="teacher",
    post__divergence="reverse",
    post__max_new_tokens=6,
    train__steps=40,
    train__batch_size=16,
    train__steps_per_call=4,
    post__rollout_epochs=2,
    train__eval_every=20,
    train__log_every=1,
    train__sample_tokens=0,
    optim__learning_rate=0.02,
    optim__warmup_steps=2,
    optim__decay_steps=40,
    mesh__data=1,
)
START = ["train", "finetune", "--init-from", "base", *SETTINGS]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a larger teacher, prompts, and a run."""
    home = tmp_path_factory.mktemp("on_policy")
    tokenizer = CharTokenizer([*LETTERS])
    save(tiny(tokenizer, seed=1, std=0.2, block_size=16, n_layer=1, n_embd=16), home / "base")
    save(tiny(tokenizer, seed=2, std=0.3, block_size=16, n_layer=2, n_embd=24), home / "teacher")
    lines = [json.dumps({"prompt": f"{a}{b}?"}) for a in "abcdefgh" for b in "abcdefgh"]
    (home / "prompts.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        result = jaxgpt(*START, "--out", "run")
    assert result.code == 0, result.err
    (home / "printed.txt").write_text(result.out)
    return home


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the home."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def lines(run: str, name: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(Path(run) / "metrics.jsonl") if name in line]


def samples(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "samples.jsonl").read_text().splitlines()]


def divergence_by_hand(student: LM, teacher: LM, prompt: str, answer: str) -> float:
    """Compute the mean KL(student || teacher) at the tokens of an answer."""
    ids = student.tokenizer.encode(prompt + answer)[None]
    first = len(student.tokenizer.encode(prompt)) - 1
    p, q = (log_p(lm.model(lm.config.model).apply({"params": lm.params}, ids[:, :-1])) for lm in (student, teacher))
    kl_BT = (np.exp(p) * (p - q)).sum(-1)
    return float(kl_BT[0, first:].mean())


@pytest.mark.ci
def test_a_student_learns_on_its_own_answers(folder: None) -> None:
    printed = Path("printed.txt").read_text()
    assert "objective: on-policy-distill, reverse divergence from " in printed
    assert "1 to each prompt, 2 epochs" in printed

    first, *_, last = lines("run", "kl")
    assert first["loss"] == pytest.approx(first["kl"], rel=1e-5)
    assert last["kl"] < 0.7 * first["kl"]
    assert last["answer_tokens"] == 6
    assert last["log_p_difference"] < 1e-4
    values = [line["val_loss"] for line in lines("run", "val_loss")]
    assert values[-1] < values[0]
    assert "loss 0." in jaxgpt("info", "run").out
    assert {path.name for path in Path("run").iterdir() if not path.name.startswith(".")} <= {*RUN_FILES}
    assert jaxgpt("plot", "run", "--out", "loss.png").code == 0

    infos, _ = read_checkpoints(Run(Path("run")).checkpoints)
    card = model_card(CardSubject(Path("run"), infos[40], Run(Path("run")).config(), "run", "jaxgpt export run out"))
    assert "On its answers to held-out prompts, the divergence from the teacher is " in card


@pytest.mark.ci
def test_the_divergence_of_an_evaluation_equals_its_definition(folder: None) -> None:
    written = [sample for sample in samples("run") if sample["step"] == 40]
    student = load("run", "last")
    teacher = load("teacher")
    for sample in written:
        expected = divergence_by_hand(student, teacher, sample["prompt"], sample["answer"])
        assert sample["divergence"] == pytest.approx(expected, rel=1e-4)
    last = lines("run", "val_loss")[-1]
    assert last["val_loss"] == pytest.approx(np.mean([sample["divergence"] for sample in written]), rel=1e-5)
    assert last["val_windows"] == len(written)

    found = jaxgpt("eval", "run", "--checkpoint", "last", "--json").json
    assert found["divergence"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert found["kl"] == pytest.approx(found["divergence"], rel=1e-5)
    assert "--weights int8 has no effect on answers of a student" in jaxgpt("eval", "run", "--weights", "int8").err
    assert "--post.reward has no effect on run" in jaxgpt("eval", "run", "--post.reward", "exact").err
    Path("text.txt").write_text("thebase?" * 20)
    assert "perplexity" in jaxgpt("eval", "run", "--data.path", "text.txt", "--json").json


@pytest.mark.ci
def test_an_evaluation_needs_the_teacher_of_the_run(folder: None) -> None:
    config = Path("run/config.json")
    recorded = json.loads(config.read_text())["post"]["reference"]
    config.write_text(config.read_text().replace(recorded, "/nowhere/teacher/checkpoints/0"))
    assert jaxgpt("eval", "run").code == 0  # the teacher is next to the run
    save(tiny(CharTokenizer([*LETTERS]), seed=3, block_size=16, n_layer=2, n_embd=24), "teacher", overwrite=True)
    assert "teacher/checkpoints/0 is not the base of run: its weights differ" in jaxgpt("eval", "run").err


@pytest.mark.ci
def test_a_stopped_run_resumes_in_equal_bits(folder: None) -> None:
    assert jaxgpt(*START, "--train.steps", "20", "--out", "cut").code == 0
    assert jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "40").code == 0
    weights = [load(run, "last").params for run in ("run", "cut")]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    assert samples("cut") == samples("run")


@pytest.mark.ci
def test_adapters_learn_on_their_answers(folder: None) -> None:
    lora = flags(lora__rank=4, lora__targets="all-linear")
    result = jaxgpt(*START, *lora, "--post.top-k", "5", "--out", "adapted")
    assert result.code == 0, result.err
    first, *_, last = lines("adapted", "kl")
    assert first["loss"] < first["kl"], "the divergence of the top tokens is a lower bound"
    assert last["kl"] < 0.9 * first["kl"]


WRONG = {
    "reward": (["--post.reward", "exact"], "post.reward has no effect on post.objective on-policy-distill"),
    "group": (["--post.group", "4"], "post.group has no effect on post.objective on-policy-distill"),
    "beta": (["--post.jsd-beta", "0.3"], "post.jsd_beta has no effect without post.divergence jsd"),
    "lambda": (["--lmbda", "0.5"], "--post.objective on-policy-distill for 1, distill for 0"),
    "text": (["--data.path", "text.txt"], "post.objective on-policy-distill needs prompts (.jsonl"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name: str, folder: None) -> None:
    given, said = WRONG[name]
    Path("text.txt").write_text("abc" * 100)
    result = jaxgpt(*START, *given, "--out", "new")
    assert result.code == 2, result.err
    assert said in result.err
    assert result.err.count("\n") == 1
    assert not Path("new").exists()


def test_on_policy_distillation_needs_a_teacher() -> None:
    with pytest.raises(
        UserError, match=r"post\.objective on-policy-distill needs a teacher: add --post\.reference RUN"
    ):
        PostConfig(objective="on-policy-distill")
