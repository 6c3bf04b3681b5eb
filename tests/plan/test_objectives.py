"""Plans of objectives beyond the next token: their batches, frozen reference, and rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from helpers import jaxgpt, small

from jaxgpt.config import Config, LoraConfig, MeshConfig, PostConfig, TrainConfig
from jaxgpt.plan.estimate import estimate
from jaxgpt.plan.plan import compile_step
from jaxgpt.plan.residuals import NEXT_TOKEN
from jaxgpt.plan.rollout import rollout
from jaxgpt.plan.topology import parse_topology
from jaxgpt.post.plan import work_of

V5E = parse_topology("v5e:2x4")
MODEL = small("gpt2", n_embd=64, n_head=4, block_size=64, vocab_size=512, n_layer=2)


def config(objective: str = "next-token", lora: int = 0, **post: Any) -> Config:
    settings = PostConfig(objective=objective, **post)  # type: ignore[arg-type]
    train = TrainConfig(batch_size=16, steps=4, eval_every=4)
    return Config(model=MODEL, train=train, post=settings, lora=LoraConfig(rank=lora), mesh=MeshConfig(data=8))


def cost(config: Config) -> Any:
    run, work = work_of(config)
    return estimate(run, V5E, work)


def generation(config: Config) -> Any:
    run, work = work_of(config)
    return rollout(run, V5E, work)


def test_preferences_compute_two_windows_and_hold_a_reference() -> None:
    text, pairs = cost(config()), cost(config("dpo", reference_log_p="every-step"))
    assert pairs.model_flops == 2 * text.model_flops
    assert pairs.memory["parameters"] == 2 * text.memory["parameters"]
    assert pairs.memory["optimizer"] == text.memory["optimizer"]
    # The reference adds a forward pass, a third of the products of training.
    assert pairs.computed_flops == pytest.approx(2 * text.computed_flops * 4 / 3, rel=0.03)


def test_the_weights_of_the_reference_are_gathered_once() -> None:
    wide = {"mesh": MeshConfig(data=1, fsdp=8)}
    every_step = config("dpo", reference_log_p="every-step")
    rows = {each.site: each for each in cost(replace(every_step, **wide)).collectives}
    once, twice = rows["weights of the reference"], rows["weights"]
    assert (once.bytes, once.times, twice.times) == (twice.bytes, 1, 2)


def test_a_reference_computed_once_is_not_in_the_step() -> None:
    """The step of DPO then costs as much as the step of SimPO; the batch has two more numbers for each of 2 pairs."""
    once, simpo = cost(config("dpo")), cost(config("simpo"))
    assert once.memory["parameters"] == simpo.memory["parameters"]
    assert once.computed_flops == simpo.computed_flops
    assert once.memory["batch"] == simpo.memory["batch"] + 2 * 2 * 4


def test_objectives_without_a_reference_hold_none() -> None:
    assert cost(config("simpo")).memory["parameters"] == cost(config()).memory["parameters"]
    adapters, text = (cost(config(name, lora=4)) for name in ("dpo", "next-token"))
    assert adapters.memory["parameters"] == text.memory["parameters"]


@pytest.mark.ci
@pytest.mark.parametrize("computed", ["once", "every-step"])
def test_the_compiled_step_of_preferences_has_the_memory_of_the_estimate(
    computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is compiled for CPUs."""
    monkeypatch.setattr("jaxgpt.plan.plan.devices_of", lambda topology: jax.devices()[:8])
    run, work = work_of(config("dpo", reference_log_p=computed))
    step = compile_step(run, V5E, work=work)
    guess = estimate(run, V5E, work)
    for kind in ("parameters", "optimizer", "batch"):
        assert step.memory[kind] == guess.memory[kind]
    assert step.model_flops == guess.model_flops
    assert step.executable is not None


def test_a_rollout_reads_weights_and_cache_in_every_step() -> None:
    post = {"reward": ("exact",), "group": 4}
    short, long, kl = (
        generation(config("grpo", **post, **changes))
        for changes in ({"max_new_tokens": 8}, {"max_new_tokens": 16}, {"max_new_tokens": 8, "kl": 0.1})
    )
    weights = short.memory["parameters"]
    rows = 2  # 16 answers on 8 devices
    slot = 2 * 4 * MODEL.n_embd * rows * MODEL.n_layer
    assert short.hbm_bytes == 8 * weights + slot * (8 * 9 / 2)
    assert long.hbm_bytes == 16 * weights + slot * (16 * 17 / 2)
    assert short.memory["cache"] == slot * MODEL.block_size
    assert short.least == {"memory": short.hbm_bytes}
    assert kl.memory["parameters"] == 2 * short.memory["parameters"]
    assert kl.model_flops > short.model_flops


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_plans_of_rollouts(objective: str) -> None:
    options = ["--post.objective", objective, "--post.reward", "exact", "--data.tokenizer", "gpt2"]
    options += ["--model.vocab-size", "512", "--model.n-layer", "1", "--estimate", "--train.steps", "4"]
    told = jaxgpt("plan", "gpt2", "--topology", "v5e:2x4", *options)
    assert told.code == 0, told.err
    assert f"objective  {objective}" in told.out
    assert "estimate of a rollout, before every 1 step: 480 answers of 64 tokens, lower bounds" in told.out
    figures = jaxgpt("plan", "gpt2", "--topology", "v5e:2x4", *options, "--json").json
    assert figures["rollout"]["memory"]["cache"] > 0


def test_the_row_of_a_plan_is_the_row_of_a_run() -> None:
    run, work = work_of(config("dpo", reference_log_p="every-step"))
    assert work.rows is not None
    assert work.rows().shape == (0, 2, 64, 3)
    assert run.post == PostConfig()
    assert work_of(config()) == (config(), NEXT_TOKEN)
