"""Distillation: laws of the divergence and its objective, and runs from the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flags, jaxgpt
from test_lm import tiny

from jaxgpt import load, save
from jaxgpt.config import ModelConfig, PostConfig
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.model import GPT
from jaxgpt.model.init import init_params
from jaxgpt.post.distill import distillation_objective, divergence, top_and_rest
from jaxgpt.trainer.metrics import read_metrics

KINDS: tuple[Literal["forward", "reverse"], ...] = ("forward", "reverse")
V = 7
LETTERS = "abcdefghijklmnopqrstuvwxyz?"


def logits(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, 2, (3, V)), jnp.float32)


def log_p(x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(x)


def test_the_forward_divergence_has_the_gradient_of_the_cross_entropy_with_soft_targets() -> None:
    q = jax.nn.softmax(logits(1))
    found = jax.grad(lambda x: divergence(log_p(x), jnp.log(q), "forward").sum())(logits(0))
    expected = jax.grad(lambda x: -(q * log_p(x)).sum())(logits(0))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found, jax.nn.softmax(logits(0)) - q, atol=1e-6)


def test_divergences_equal_their_definitions() -> None:
    p, q = (np.exp(np.asarray(log_p(logits(seed)), np.float64)) for seed in (0, 1))
    for kind, (a, b) in {"forward": (q, p), "reverse": (p, q)}.items():
        found = divergence(log_p(logits(0)), log_p(logits(1)), kind)
        np.testing.assert_allclose(found, (a * np.log(a / b)).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_top_of_all_tokens_is_the_whole_distribution(kind: Literal["forward", "reverse"]) -> None:
    def loss(x: jax.Array, k: int) -> jax.Array:
        p, q = log_p(x), log_p(logits(1))
        if k:
            p, q = top_and_rest(p, q, k)
        return divergence(p, q, kind).sum()

    whole, slope = jax.value_and_grad(loss)(logits(0), 0)
    top, top_slope = jax.value_and_grad(loss)(logits(0), V)
    np.testing.assert_allclose(top, whole, rtol=1e-5)
    np.testing.assert_allclose(top_slope, slope, atol=1e-5)
    assert 0 < loss(logits(0), 2) < loss(logits(0), 4) < whole, "more tokens show more of the divergence"


def test_probabilities_of_the_top_and_the_rest() -> None:
    log_q = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25]))
    log_s = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    p, q = top_and_rest(log_s, log_q, 2)
    np.testing.assert_allclose(jnp.exp(q), [0.5, 0.25, 0.25], rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(p), [0.3, 0.1, 0.6], rtol=1e-5)


def model(n_layer: int, n_embd: int) -> tuple[GPT, Any]:
    config = ModelConfig(vocab_size=V, block_size=8, n_layer=n_layer, n_head=2, n_embd=n_embd, init_std=0.5)
    gpt = GPT(config)
    return gpt, jax.jit(partial(init_params, gpt))(n_layer)


def objective_of(student: GPT, teacher: GPT, chunk: int = 0, **settings: Any) -> Any:
    post = PostConfig(**{"objective": "distill", "reference": "teacher", **settings})
    return distillation_objective(student.apply, teacher.apply, post, chunk)


WINDOWS = np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, -1, -1]], np.int32)


@pytest.mark.parametrize(("kind", "top_k"), [("forward", 0), ("reverse", 0), ("forward", 3)])
def test_equal_models_have_no_loss_and_no_gradient(kind: str, top_k: int) -> None:
    gpt, params = model(1, 8)
    objective = objective_of(gpt, gpt, divergence=kind, top_k=top_k)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: objective(p, WINDOWS, None, params).loss_B.sum()))(params)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_allclose(leaf, 0, atol=1e-6)


def test_sums_over_positions_with_targets() -> None:
    """The models differ in layers and width. Chunks change nothing."""
    student, params = model(1, 8)
    teacher, frozen = model(2, 12)

    def sums_of(chunk: int = 0, **settings: Any) -> Any:
        objective = objective_of(student, teacher, chunk, **settings)
        return jax.jit(lambda params, frozen: objective(params, WINDOWS, None, frozen))(params, frozen)

    sums = sums_of()
    assert sums.count_B.tolist() == [5, 3]
    inputs = np.maximum(WINDOWS[:, :-1], 0)
    p = log_p(jax.jit(student.apply)({"params": params}, inputs))
    q = log_p(jax.jit(teacher.apply)({"params": frozen}, inputs))
    kl_BT = np.asarray((jnp.exp(q) * (q - p)).sum(-1))
    np.testing.assert_allclose(sums.loss_B, [kl_BT[0].sum(), kl_BT[1, :3].sum()], rtol=1e-5)
    first = [-float(p[0, t, WINDOWS[0, t + 1]]) for t in range(5)]
    assert float(sums.others["cross_entropy"][0]) == pytest.approx(sum(first), rel=1e-5)

    np.testing.assert_allclose(sums_of(chunk=2).loss_B, sums.loss_B, rtol=1e-5)
    np.testing.assert_allclose(sums_of(chunk=3, top_k=2).loss_B, sums_of(top_k=2).loss_B, rtol=1e-5)


SETTINGS = flags(
    data__path="text.txt",
    model__block_size=16,
    model__n_layer=1,
    model__n_embd=16,
    model__n_head=2,
    model__n_inner=32,
    train__batch_size=16,
    train__steps=40,
    train__eval_every=20,
    train__sample_tokens=0,
    optim__learning_rate=0.01,
    optim__warmup_steps=2,
    mesh__data=1,
)
STUDENT = ["train", "llama-tiny", "--post.objective", "distill", "--post.reference", "teacher", *SETTINGS]


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher with random weights and learned positions, and a text."""
    monkeypatch.chdir(tmp_path)
    save(tiny(CharTokenizer([*LETTERS]), std=0.2, block_size=16, n_layer=2, n_embd=24), "teacher")
    rng = np.random.default_rng(0)
    Path("text.txt").write_text("".join(rng.choice([*LETTERS], 4000)))


def lines(run: str, name: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(Path(run) / "metrics.jsonl") if name in line]


@pytest.mark.ci
def test_a_student_of_another_architecture_learns_from_its_teacher(teacher: None) -> None:
    result = jaxgpt(*STUDENT, "--out", "student")
    assert result.code == 0, result.err
    assert "objective: distill, forward divergence from " in result.out
    first, last = lines("student", "val_loss")
    assert last["val_loss"] < 0.8 * lines("student", "loss")[0]["loss"]
    assert last["val_loss"] < first["val_loss"]
    assert last["val_cross_entropy"] > 1
    assert load("student").config.model.vocab_size == len(LETTERS)
    assert "perplexity" in jaxgpt("eval", "student", "--json").json
    assert "baseline" not in result.out

    for out, steps in (("cut", "20"), ("cut", "40")):
        again = ["train", "--resume", "--out", "cut", "--train.steps", steps]
        words = (
            again
            if Path(out).exists()
            else [*STUDENT, "--out", out, "--train.steps", steps, "--optim.decay-steps", "40"]
        )
        assert jaxgpt(*words).code == 0
    assert jaxgpt(*STUDENT, "--out", "straight", "--optim.decay-steps", "40").code == 0
    cut, straight = (jax.tree.leaves(load(run, "last").params) for run in ("cut", "straight"))
    assert all(np.array_equal(a, b) for a, b in zip(cut, straight, strict=True))

    save(
        tiny(CharTokenizer([*LETTERS]), seed=5, std=0.2, block_size=16, n_layer=2, n_embd=24), "teacher", overwrite=True
    )
    result = jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "60")
    assert result.code == 2
    assert "is not the base of cut: its weights differ" in result.err


WRONG = {
    "missing": (["--post.reference", "nowhere"], "nowhere"),
    "context": (
        ["--model.block-size", "32"],
        "model.block_size 32 exceeds the context of the teacher, 16 tokens: lower",
    ),
    "tokenizer": (["--data.tokenizer", "char"], "uses the tokenizer of the teacher: omit data.tokenizer"),
    "vocabulary": (["--model.vocab-size", "30"], "post.reference teacher has a vocabulary of 27, but"),
    "adapters": (["--lora.rank", "2"], "--lora.rank needs the weights of a run"),
    "unused": (["--post.beta", "0.2"], "post.beta has no effect on post.objective distill"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name: str, teacher: None) -> None:
    given, said = WRONG[name]
    result = jaxgpt(*STUDENT, *given, "--out", "new")
    assert result.code == 2, result.err
    assert said in result.err
    assert result.err.count("\n") == 1
    assert not Path("new").exists()


def test_settings_are_recorded_for_others(teacher: None) -> None:
    """The plan rejects an unknown teacher, and the settings of other objectives name distillation."""
    assert (
        jaxgpt(
            "plan",
            "gpt2",
            "--topology",
            "v5e:1x1",
            "--estimate",
            "--post.objective",
            "distill",
            "--post.reference",
            "x",
        ).code
        == 2
    )
    result = jaxgpt("train", "llama-tiny", "--post.top-k", "5", "--data.path", "text.txt")
    assert "post.top_k has no effect on post.objective next-token: add --post.objective distill" in result.err
    result = jaxgpt("train", "llama-tiny", "--post.objective", "distill", "--data.path", "text.txt")
    assert "post.objective distill needs a teacher: add --post.reference RUN" in result.err
    assert json.loads(Path("teacher/config.json").read_text())["post"]["objective"] == "next-token"
