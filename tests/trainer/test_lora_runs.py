"""Training adapters: only they are trained and saved; a run finds its base, and a resumed run gives the same bits."""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from folders import LLAMA, SMALL, TEXT, run_folder
from helpers import Result, comparable, flags, jaxgpt, make, small
from jax.sharding import PartitionSpec

import jaxgpt as api
from jaxgpt.checkpoint.info import read_info
from jaxgpt.checkpoint.source import checksum
from jaxgpt.config import Config, LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.counts import state_bytes
from jaxgpt.lm.model import load_adapters
from jaxgpt.model.lora import abstract_trained, merge
from jaxgpt.model.params import flatten_params
from jaxgpt.trainer.build import build, with_arrays
from jaxgpt.trainer.metrics import read_metrics
from jaxgpt.trainer.program import Program

TARGETS = "q_proj,v_proj,o_proj,up_proj"


@functools.cache
def program(name: str = "llama", mesh: MeshConfig | None = None, **train: Any) -> tuple[Program, Any]:
    """Build the program of a small model with adapters on random weights, and return it with these weights."""
    config = Config(
        model=small(name),
        optim=OptimConfig(learning_rate=0.01, schedule="constant", warmup_steps=0),
        train=TrainConfig(batch_size=8, **train),
        mesh=mesh or MeshConfig(data=1),
        lora=LoraConfig(rank=2, alpha=8.0, targets=TARGETS),
    )
    params = jax.tree.map(np.asarray, make(config.model)[1])
    return build(config, frozen=params), params


def train(p: Program, n: int) -> tuple[list[float], Any]:
    state, losses = p.init(), []
    rng = np.random.default_rng(0)
    for _ in range(n):
        batch = rng.integers(0, p.config.model.vocab_size, (8, p.config.model.block_size + 1), np.int32)
        state, metrics = p.step(state, p.put(batch))
        losses.append(float(metrics["loss"]))
    return losses, state


def test_only_adapters_are_trained() -> None:
    p, params = program()
    before = jax.tree.map(np.array, p.frozen)
    losses, state = train(p, 3)
    jax.tree.map(np.testing.assert_array_equal, p.frozen, before)
    jax.tree.map(np.testing.assert_array_equal, p.frozen, params)
    config = p.config
    adapters = abstract_trained(config.model, config.lora)
    shapes = {path: leaf.shape for path, leaf in flatten_params(adapters).items()}
    assert {path: leaf.shape for path, leaf in flatten_params(state.params).items()} == shapes
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sorted(leaf.shape for leaf in moments) == sorted([*shapes.values()] * 2)
    n = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state)) - 8 * n < 100  # counters
    counted = state_bytes(config, params)
    assert counted["optimizer"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert counted["gradients"] == 4 * n
    assert n < sum(leaf.size for leaf in jax.tree.leaves(params)) / 2
    # The first loss matches the base, and evaluation uses the merged weights.
    plain = build(replace(config, lora=LoraConfig()))
    batch = plain.put(np.random.default_rng(0).integers(0, 17, (8, 13), np.int32))
    sums = plain.sums(plain.put_params(params), batch)
    np.testing.assert_allclose(losses[0], sums.loss_B.sum() / sums.count_B.sum(), rtol=1e-6)
    trained_B = p.sums(state.params, batch).loss_B
    np.testing.assert_allclose(trained_B, plain.sums(p.weights(state.params), batch).loss_B, rtol=1e-5)
    assert np.abs(trained_B - sums.loss_B).max() > 0.01


@pytest.mark.ci
def test_a_base_replaces_frozen_weights_that_were_read() -> None:
    p, params = program.__wrapped__()  # not the cached program, which other tests use
    other = jax.tree.map(lambda x: x + 1, params)
    assert np.array_equal(p.frozen["wte"]["embedding"], params["wte"]["embedding"])
    p = with_arrays(p, other)
    assert np.array_equal(p.frozen["wte"]["embedding"], other["wte"]["embedding"])


def test_a_mesh_and_stacked_layers_give_the_same_losses() -> None:
    one, _ = program()
    p, _ = program(mesh=MeshConfig(data=2, fsdp=2, tensor=2), scan_layers=True, accumulation=8)
    kernel = p.frozen["h"]["attn"]["q_proj"]["kernel"]
    adapter = p.abstract.state.params["h"]["attn"]["q_proj"]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert adapter["a"].sharding.spec == PartitionSpec(None, "fsdp", None)
    assert adapter["b"]["q_proj"].sharding.spec == PartitionSpec(None, None, "tensor")
    np.testing.assert_allclose(train(p, 3)[0], train(one, 3)[0], rtol=2e-5)


RUN = flags(
    data__path="text.txt",
    data__window=8,
    train__steps=4,
    train__batch_size=4,
    train__eval_every=2,
    train__log_every=1,
    train__sample_tokens=3,
    optim__learning_rate=0.01,
    mesh__data=1,
)
LORA = flags(lora__rank=2, lora__alpha=8, lora__targets="c_attn,mlp.c_proj")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a base and a run of four steps with adapters of it; do not modify."""
    folder = tmp_path_factory.mktemp("lora")
    run_folder(folder / "base", replace(SMALL, n_layer=1))
    (folder / "text.txt").write_text(TEXT * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = jaxgpt("train", "finetune", "--init-from", "base", *RUN, *LORA, "--out", "run")
    assert result.code == 0, result.err
    assert "LoRA of rank 2 on q_proj+k_proj+v_proj,down_proj: " in result.out
    return folder


@pytest.fixture
def folder(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that directory; the recorded path of the base is the original."""
    shutil.copytree(finished, "copy")
    monkeypatch.chdir("copy")
    return Path.cwd()


def error(result: Result) -> str:
    """Return the last line of a failed command; before it, `--resume` prints the path of the run."""
    lines = result.err.splitlines()
    assert (result.code, result.out) == (2, ""), result.err
    assert len(lines) == 1 or "resuming from" in lines[0], lines
    return lines[-1]


@pytest.mark.ci
def test_a_resumed_run_equals_an_uninterrupted_one(folder: Path) -> None:
    shutil.copytree("run", "whole")
    shutil.rmtree("run/checkpoints/4")
    result = jaxgpt("train", "--resume", "--out", "run")
    assert result.code == 0, result.err
    for part in ("params", "opt_state"):
        sums = [checksum(restored(Path(run), part)) for run in ("run", "whole")]
        assert sums[0] == sums[1], part
    assert comparable("run") == comparable("whole")
    config = open_config("run")
    saved = {name: leaf.shape for name, leaf in flatten_params(restored(Path("run"), "params")).items()}
    assert saved == {n: s.shape for n, s in flatten_params(abstract_trained(config.model, config.lora)).items()}


def restored(run: Path, part: str) -> Any:
    from orbax.checkpoint import v1 as ocp

    return ocp.load_checkpointables((run / "checkpoints/4").absolute())[part]


@pytest.mark.ci
def test_a_run_is_its_merged_weights(folder: Path) -> None:
    config, params, adapters = load_adapters("run", "last")
    lm = api.load("run", "last")
    assert not lm.config.lora.rank
    assert config.lora.targets == "q_proj+k_proj+v_proj,down_proj"
    jax.tree.map(np.testing.assert_array_equal, lm.params, merge(params, adapters, 8.0))
    base = api.load("base").params
    jax.tree.map(np.testing.assert_array_equal, params, base)
    assert read_info(Path("run/checkpoints/4")).about["base"] == checksum(base)
    # Once saved, the merged model is an ordinary run without adapters.
    for config, path in ((lm.config, "merged"), (open_config("run"), "again")):
        api.save(lm._replace(config=config), path)
        again = api.load(path)
        assert again.config.lora == LoraConfig()
        jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    info = jaxgpt("info", "run", "--json").json
    assert info["trainable_parameters"] == sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert info["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    for command in (["sample", "run", "--prompt", "a", "--max-new-tokens", "3"], ["eval", "run"], ["info", "run"]):
        result = jaxgpt(*command)
        assert result.code == 0, result.err
        assert result.err in ("", "jaxgpt: sampled from run, step 4\n")
    loss = jaxgpt("eval", "run", "--checkpoint", "last", "--json").json["loss"]
    lines = [line for line in read_metrics(Path("run/metrics.jsonl")) if "val_loss" in line]
    (val_loss,) = [line["val_loss"] for line in lines if line["step"] == 4]
    assert abs(loss - val_loss) < 1e-5


@pytest.mark.ci
def test_a_run_finds_its_base(folder: Path, finished: Path) -> None:
    """A base is found at its recorded path or next to the run; without the right base, nothing is written."""
    config = Path("run/config.json")
    recorded = f'"init_from": "{finished}/base/checkpoints/0"'
    assert recorded in config.read_text()
    config.write_text(config.read_text().replace(recorded, '"init_from": "/nowhere/base/checkpoints/0"'))
    before = config.read_text()
    assert jaxgpt("eval", "run").code == 0  # next to the run
    Path("base").rename("elsewhere")
    again = ["train", "--resume", "--out", "run", "--train.steps", "6"]
    for command in (["eval", "run"], again):
        message = error(jaxgpt(*command))
        assert "holds adapters of /nowhere/base/checkpoints/0, which is missing" in message
    run_folder(Path("base"), replace(SMALL, n_layer=1), seed=1)
    for command in (["sample", "run", "--prompt", "a"], again):
        assert "base/checkpoints/0 is not the base of run: its weights" in error(jaxgpt(*command))
    shutil.rmtree("base")
    run_folder(Path("base"), LLAMA)
    message = "base/checkpoints/0 is not the base of these adapters: its architecture differs"
    assert message in error(jaxgpt(*again))
    message = "--init-from elsewhere: run started from the weights of /nowhere/base"
    assert message in error(jaxgpt(*again, "--init-from", "elsewhere"))
    assert config.read_text() == before


def test_adapters_need_a_base_and_a_resumed_run_keeps_them(folder: Path) -> None:
    start = ["train", "nanogpt-cpu", *RUN, "--lora.rank", "2"]
    assert "--lora.rank needs the weights of a run: add --init-from RUN" in error(jaxgpt(*start))
    again = ["train", "--resume", "--out", "run", "--train.steps", "6"]
    assert "keeps lora.rank: 2, not 3" in error(jaxgpt(*again, "--lora.rank", "3"))
    assert "keeps lora.targets: " in error(jaxgpt(*again, "--lora.targets", "c_attn"))
    config = Path("run/config.json")
    settings = config.read_text()
    config.write_text(re.sub('"init_from": ".*"', '"init_from": "/nowhere/run/checkpoints/4"', settings))
    assert "run/checkpoints/4, the base of run, needs run itself: restore" in error(jaxgpt("eval", "run"))
    config.write_text(settings.replace('"rank": 2', '"rank": 3'))
    assert "a resumed run keeps lora.rank: 2, not 3" in error(jaxgpt(*again))


def test_a_run_does_not_replace_its_base(folder: Path) -> None:
    start = ["train", "finetune", *RUN, "--out", "base", "--overwrite", "--init-from"]
    for words in (["base"], ["base", "--lora.rank", "2"]):
        assert "--out base --overwrite would delete the weights to start from: choose" in error(jaxgpt(*start, *words))
    adapted = ["--lora.rank", "2", "--train.steps", "1", "--out", "adapted", "--init-from", "base"]
    assert jaxgpt("train", "finetune", *RUN, *adapted).code == 0
    assert "--out base --overwrite would delete" in error(jaxgpt(*start, "adapted"))
    Path("moved").mkdir()
    for name in ("base", "adapted"):
        shutil.move(name, "moved")
    moved = ["train", "finetune", *RUN, "--train.steps", "1", "--init-from", "moved/adapted", "--overwrite", "--out"]
    assert "--out moved/base --overwrite would delete" in error(jaxgpt(*moved, "moved/base"))
    assert jaxgpt(*moved, "new").code == 0


@pytest.mark.ci
def test_a_repeated_run_with_other_weights_keeps_its_window_and_dropout(folder: Path) -> None:
    changed = ["--data.window", "6", "--model.dropout", "0.1", "--train.steps", "1"]
    assert jaxgpt("train", "finetune", "--init-from", "base", *RUN, *changed, "--out", "first").code == 0
    shutil.copytree("base", "moved")
    result = jaxgpt("train", "first", "--init-from", "moved", "--out", "second")
    assert f"using the settings of first, starting from the weights of {Path.cwd()}/moved" in result.err
    first, second = open_config("first"), open_config("second")
    assert (second.model, second.data.window) == (first.model, 6)


def open_config(run: str) -> Config:
    from jaxgpt.checkpoint.run import Run

    return Run(Path(run)).config()
