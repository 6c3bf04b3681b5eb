"""Distillation by adapters: two frozen trees, the base of the adapters and the teacher."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flags, jaxgpt, make, small
from jax.sharding import PartitionSpec
from test_distill import LETTERS, model, objective_of
from test_lm import tiny

from jaxgpt import load, save
from jaxgpt.checkpoint.info import read_info
from jaxgpt.checkpoint.run import open_run
from jaxgpt.checkpoint.source import checksum, open_source
from jaxgpt.config import Config, LoraConfig, MeshConfig, PostConfig, TrainConfig
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm.model import load_adapters
from jaxgpt.model.lora import init_lora, merge
from jaxgpt.post.start import build_program
from jaxgpt.train.adapters import FrozenParts, with_adapters
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import Start, train
from jaxgpt.trainer.metrics import read_metrics

WINDOWS = np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, -1, -1]], np.int32)
IS_TARGET = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_loss_and_gradients_of_adapters_equal_a_hand_written_objective() -> None:
    student, base = model(1, 8)
    teacher, frozen = model(2, 12)
    adapters = init_lora(jax.random.key(1), base, rank=2)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)  # B = 0 has no gradient with respect to A

    def by_hand(adapters: Any) -> jax.Array:
        """Compute the forward divergence with the weights W + (alpha / r) A B of queries and values."""
        block = dict(base["h_0"])
        attention = dict(block["attn"])
        for name in ("q_proj", "v_proj"):
            adapter = adapters["h_0"]["attn"][name]
            changed = attention[name]["kernel"] + 8 / 2 * adapter["a"] @ adapter["b"][name]
            attention[name] = attention[name] | {"kernel": changed}
        weights = base | {"h_0": block | {"attn": attention}}
        inputs_BT = np.maximum(WINDOWS[:, :-1], 0)
        log_p = jax.nn.log_softmax(student.apply({"params": weights}, inputs_BT))
        log_q = jax.nn.log_softmax(teacher.apply({"params": frozen}, inputs_BT))
        return (IS_TARGET * (jnp.exp(log_q) * (log_q - log_p)).sum(-1)).sum()

    adapted = with_adapters(objective_of(student, teacher), alpha=8.0)

    def by_objective(adapters: Any) -> jax.Array:
        return adapted(adapters, WINDOWS, None, FrozenParts(base, frozen)).loss_B.sum()

    expected, slopes = jax.jit(jax.value_and_grad(by_hand))(adapters)
    found, found_slopes = jax.jit(jax.value_and_grad(by_objective))(adapters)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert min(np.abs(slope).max() for slope in jax.tree.leaves(slopes)) > 1e-3
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found_slopes, slopes)


TEACHER = small("llama", n_layer=3, n_embd=24)


def program(mesh: MeshConfig, **settings: Any) -> Any:
    """Build a program with random weights as the base, and a larger teacher."""
    config = Config(
        model=small("llama"),
        train=TrainConfig(batch_size=8, **settings),
        mesh=mesh,
        lora=LoraConfig(rank=2),
        post=PostConfig(objective="distill", reference="teacher"),
    )
    weights, teacher = (jax.tree.map(np.asarray, make(each)[1]) for each in (config.model, TEACHER))

    def read_teacher(place: Any) -> Any:
        return teacher

    return build_program(config, TEACHER, frozen=FrozenParts(weights, read_teacher))


def first_loss(program: Any) -> float:
    batch = np.random.default_rng(0).integers(0, 17, (8, 13), np.int32)
    _, metrics = program.step(program.init(), program.put(batch))
    return float(metrics["loss"])


@pytest.mark.ci
def test_both_frozen_trees_are_sharded() -> None:
    one = program(MeshConfig(data=1))
    many = program(MeshConfig(data=2, fsdp=2, tensor=2), scan_layers=True)
    for tree in (many.frozen.base, many.frozen.of_objective):
        kernel = tree["h"]["attn"]["q_proj"]["kernel"]
        assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert many.reference["h"]["attn"]["q_proj"]["kernel"].shape[0] == 3, "layers of the teacher"
    assert first_loss(many) == pytest.approx(first_loss(one), rel=2e-5)


RUN = flags(
    data__path="text.txt",
    data__window=16,
    train__batch_size=16,
    train__eval_every=10,
    train__sample_tokens=0,
    train__log_every=1,
    optim__learning_rate=0.02,
    optim__warmup_steps=2,
    optim__decay_steps=20,
    mesh__data=1,
)
DISTILL = flags(lora__rank=2, post__objective="distill", post__reference="teacher")
START = ["train", "finetune", "--init-from", "base", *DISTILL, *RUN]


def save_model(name: str, seed: int, **sizes: int) -> None:
    model = tiny(CharTokenizer([*LETTERS]), seed=seed, std=0.2, block_size=16, **sizes)
    save(model, name, overwrite=True)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base, a larger teacher, and a text."""
    monkeypatch.chdir(tmp_path)
    save_model("base", 1, n_layer=1, n_embd=16)
    save_model("teacher", 2, n_layer=2, n_embd=24)
    rng = np.random.default_rng(0)
    Path("text.txt").write_text("".join(rng.choice([*LETTERS], 2000)))


@pytest.mark.ci
def test_a_run_with_adapters_resumes_in_equal_bits_with_its_teacher(models: None) -> None:
    straight = jaxgpt(*START, "--train.steps", "20", "--out", "straight")
    assert straight.code == 0, straight.err
    assert jaxgpt(*START, "--train.steps", "10", "--out", "cut").code == 0
    assert jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "20").code == 0
    weights = [load(run, "last").params for run in ("straight", "cut")]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    values = [row["val_loss"] for row in read_metrics(Path("straight/metrics.jsonl")) if "val_loss" in row]
    assert values[-1] < 0.95 * values[0]

    # Checkpoints name both trees. The weights of the run are the base with its adapters.
    about = read_info(Path("straight/checkpoints/20")).about
    assert about["base"] == checksum(load("base").params)
    assert about["frozen"] == checksum(load("teacher").params)
    config, base, adapters = load_adapters("straight", "last")
    merged = merge(base, adapters, config.lora.alpha)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), weights[0], merged)

    # Neither tree may change.
    save_model("teacher", 3, n_layer=2, n_embd=24)
    result = jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "30")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "is not the reference of cut: its weights differ from the original: restore it" in result.err


@pytest.mark.ci
def test_optimizer_state_without_the_base_of_its_adapters_is_an_error(models: None) -> None:
    assert jaxgpt(*START, "--train.steps", "10", "--out", "run").code == 0
    config = open_run(Path("run")).config()
    config = config.with_settings({"init_from": "", "state_from": "run/checkpoints/10"})
    build = partial(build_program, teacher=load("teacher").config.model)
    start = Start(config, out="next", build=build, frozen=open_source("teacher"))
    with pytest.raises(UserError, match=r"needs the base of its adapters: set init_from to the init_from of that run$"):
        train(start, Listener())
    assert not Path("next").exists()
