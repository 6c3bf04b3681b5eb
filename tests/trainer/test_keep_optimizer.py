"""`--init-from RUN --keep-optimizer`: a second phase of training, with the moments of a checkpoint and a new schedule."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import TEXT, flags, jaxgpt, small_run
from test_loop import Silent, same_bits

from jaxgpt.checkpoint import store
from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import read_info, seal
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.weights_settings import SIZES, with_weights
from jaxgpt.config import Config, LoraConfig, OptimConfig
from jaxgpt.errors import UserError
from jaxgpt.lm import load
from jaxgpt.train.optimizer import make_optimizer
from jaxgpt.train.schedule import restart_schedules, schedule, schedule_states
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.build import build
from jaxgpt.trainer.loop import train
from jaxgpt.trainer.metrics import read_metrics
from jaxgpt.trainer.start import Start
from jaxgpt.trainer.starting_state import restarted_state


def first(config: Config, out: str = "first") -> TrainState:
    """Train a first phase."""
    Path("text.txt").write_text(TEXT)
    return train(Start(config, out), Silent()).state


def second(init_from: str = "first", **settings: Any) -> Config:
    """Return the settings of a second phase."""
    return with_weights(Run(Path("first")).config(), init_from, settings, SIZES, keep_optimizer=True)


def start_of(config: Config) -> TrainState:
    """Return the state before the first step of a run."""
    assert train(Start(config, "second"), Silent(), until=1).step == 1
    origin = Path(config.state_from)
    return restarted_state(build(config), origin)


@pytest.mark.parametrize(
    "name", ["muon", pytest.param("adamw", marks=pytest.mark.ci), pytest.param("lion", marks=pytest.mark.long)]
)
def test_moments_are_those_of_the_last_checkpoint_and_the_schedule_starts_again(name: Any) -> None:
    optim = OptimConfig(name=name, warmup_steps=3, ema_decay=0.9)
    state = first(replace(small_run(), optim=optim))
    best = read_info(Path("first/checkpoints/4"))
    seal(Path("first/checkpoints/4"), replace(best, ranking=0.0))
    config = second(**{"optim.warmup_steps": 2, "train.steps": 3})
    assert config.state_from == config.init_from == f"{Path.cwd()}/first/checkpoints/8", "the last, not the best"

    restored = start_of(config)
    assert int(restored.step) == 0
    assert same_bits((restored.params, restored.ema), (state.params, state.ema))
    assert same_bits(restored.opt_state, restart_schedules(state.opt_state))
    assert [int(each.count) for each in schedule_states(restored.opt_state)] == [0] * len(
        schedule_states(state.opt_state)
    )

    train(Start(config, "whole"), Silent())
    rates = [line["lr"] for line in read_metrics(Path("whole/metrics.jsonl")) if "loss" in line]
    np.testing.assert_allclose(rates, schedule(config)(np.arange(3)), rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd", "adafactor"])
def test_only_the_counts_of_schedules_are_reset(name: Any) -> None:
    """The bias corrections of moments need the number of updates in the moments."""
    params = {"h_0": {"mlp": {"up_proj": {"kernel": np.ones((4, 4), np.float32)}}}}
    config = Config(optim=OptimConfig(name=name))
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update(params, state, params)
    before = dict(jax.tree_util.tree_leaves_with_path(state))
    after = dict(jax.tree_util.tree_leaves_with_path(restart_schedules(state)))
    reset = [path for path in before if not np.array_equal(before[path], after[path])]
    assert len(reset) == len(schedule_states(state)) >= 1
    assert all(int(after[path]) == 0 and int(before[path]) == 3 for path in reset)


def test_one_step_equals_a_step_of_optax_from_the_same_moments() -> None:
    """The update has the moments of the first phase and the rate of the second."""
    optim = OptimConfig(name="sgd", warmup_steps=0, weight_decay=0.0, grad_clip=0.0)
    state = first(replace(small_run(), optim=optim))
    config = second(**{"optim.learning_rate": 0.5, "optim.min_lr": 0.1, "train.steps": 4})
    after = train(Start(config, "second"), Silent(), until=1).state
    for moment, old, new in zip(
        jax.tree.leaves(after.opt_state[1][0][0]),
        jax.tree.leaves(state.params),
        jax.tree.leaves(after.params),
        strict=True,
    ):
        np.testing.assert_allclose(new, old - 0.5 * moment, rtol=1e-5, atol=1e-6)


def test_an_average_starts_at_the_weights_if_the_checkpoint_has_none() -> None:
    state = first(replace(small_run(), optim=OptimConfig(warmup_steps=2)))
    restored = start_of(second(**{"optim.ema_decay": 0.9, "optim.not_finite": "skip"}))
    assert same_bits(restored.ema, state.params)
    assert restored.skip is not None
    assert int(restored.skip.total) == 0


def test_adapters_keep_their_base_and_their_moments() -> None:
    config = replace(small_run(), optim=OptimConfig(name="adamw", warmup_steps=2))
    first(config, "base")
    tuned = with_weights(config, "base", {"lora.rank": 2, "lora.targets": "q_proj"}, SIZES)
    state = first(tuned)
    config = second(**{"train.steps": 2, "train.seed": 3})
    assert config.init_from == tuned.init_from
    assert config.lora == LoraConfig(rank=2, targets="q_proj")
    outcome = train(Start(config, "second"), Silent(), until=1)
    restored = restarted_state(build(config), Path("first/checkpoints/8"))
    assert same_bits(restored.params, state.params)
    assert int(outcome.state.step) == 1
    assert load("second").config.model == load("base").config.model
    assert not np.array_equal(load("second", "last").params["wte"]["embedding"], 0)


@pytest.mark.ci
def test_a_second_phase_is_resumed_and_repeated_with_its_state() -> None:
    """A run killed before its first checkpoint starts from the same state again."""
    first(small_run())
    config = second(**{"train.steps": 4})
    whole = train(Start(config, "second"), Silent()).state
    for step in checkpoints(Path("second/checkpoints")):
        path = Path("second/checkpoints", str(step))
        path.rename(f"second/checkpoints/{step}.partial")
    command = ["train", "first/config.json", "--init-from", "first", "--keep-optimizer", "--out", "second", "--resume"]
    result = jaxgpt(*command)
    assert result.code == 0, result.err
    state = build(Run(Path("second")).config()).restore(Path("second/checkpoints"), 4)
    assert same_bits(state, whole)
    again = jaxgpt("train", "second", "--out", "again")
    assert again.code == 0, again.err
    assert f"starting from the weights and the optimizer state of {config.state_from}" in again.err
    assert same_bits(build(config).restore(Path("again/checkpoints"), 4), whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            flags(optim__name="muon"),
            "needs optim.name adamw, as in first, not muon: use --optim.name adamw, or omit --keep",
        ),
        (flags(optim__momentum_dtype="bfloat16"), "needs optim.momentum_dtype float32, as in first, not bfloat16"),
        (flags(lora__rank=2), "needs lora.rank 0, as in first, not 2"),
    ],
)
def test_a_different_optimizer_is_one_error(settings: list[str], message: str) -> None:
    Path("text.txt").write_text(TEXT)
    config = replace(small_run(steps=1), optim=OptimConfig(name="adamw", warmup_steps=2))
    train(Start(config, "first"), Silent())
    result = jaxgpt("train", "first", "--init-from", "first", "--keep-optimizer", "--out", "new", *settings)
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert f"--keep-optimizer {message}" in result.err
    assert not Path("new").exists()


def test_without_a_run_or_its_optimizer_there_is_one_error() -> None:
    result = jaxgpt("train", "--keep-optimizer", "--out", "new")
    assert (
        result.code,
        "--keep-optimizer needs the run with the optimizer state: add --init-from RUN" in result.err,
    ) == (2, True)
    first(small_run(steps=2))
    for opt_state in Path("first/checkpoints").glob("*/opt_state"):
        opt_state.rename(opt_state.with_name("other"))
    with pytest.raises(UserError, match="first/checkpoints/2 has no optimizer state: omit --keep-optimizer"):
        second()


def test_a_damaged_checkpoint_is_an_error() -> None:
    first(small_run(steps=2))
    config = second()
    for file in Path("first/checkpoints/2/opt_state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
            break
    with pytest.raises(
        UserError, match=r"first/checkpoints/2 is damaged: .*; choose a different step, or omit --keep-optimizer"
    ):
        train(Start(config, "second"), Silent())


def test_a_deleted_first_checkpoint_is_named_if_the_second_phase_was_killed_before_its_own() -> None:
    """The first run may go on, and prune the checkpoint that the second phase starts from."""
    first(small_run())
    config = second(**{"train.steps": 3})
    with pytest.raises(RuntimeError):
        train(Start(config, "second", feed=killed), Silent())
    assert not checkpoints(Path("second/checkpoints"))
    shutil.rmtree(config.state_from)
    message = (
        "^the checkpoint to start from, .*/first/checkpoints/8, has been deleted: restore it, or start from a different"
    )
    with pytest.raises(UserError, match=message):
        train(Start(config, run=Run(Path("second"))), Silent())


def killed(*args: Any) -> Any:
    """A feed that ends the run before its first step."""
    raise RuntimeError("killed")


def test_the_restored_arrays_are_used_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps and counts of schedules are new arrays, so weights and moments need no second copy in memory."""
    first(replace(small_run(steps=2), optim=OptimConfig(name="adamw", warmup_steps=2)))
    config = second()
    restored: list[TrainState] = []
    restore = store.restore

    def recorded(*args: Any) -> TrainState:
        restored.append(restore(*args))
        return restored[-1]

    monkeypatch.setattr(store, "restore", recorded)
    state = restarted_state(build(config), Path("first/checkpoints/2"))

    def buffers(tree: Any) -> set[int]:
        shards = [shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        return {shard.unsafe_buffer_pointer() for shard in shards if shard.size > 1}

    [before] = restored
    assert buffers((state.params, state.opt_state)) == buffers((before.params, before.opt_state))


def test_adapters_do_not_continue_on_a_changed_base() -> None:
    config = replace(small_run(steps=2), optim=OptimConfig(name="adamw", warmup_steps=2))
    first(config, "base")
    first(with_weights(config, "base", {"lora.rank": 2, "lora.targets": "q_proj"}, SIZES))
    tuned = second(**{"train.steps": 2})
    shutil.rmtree("base")
    first(replace(config, train=replace(config.train, seed=5)), "base")
    with pytest.raises(UserError, match=r"is not the base of .*first: its weights differ from the original"):
        train(Start(tuned, "second"), Silent())
