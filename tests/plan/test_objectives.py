"""Plans of objectives beyond the next token: their batches, frozen reference, and rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import jaxgpt, small

from jaxgpt.config import Config, LoraConfig, MeshConfig, ModelConfig, PostConfig, TrainConfig
from jaxgpt.config_json import to_json
from jaxgpt.counts import parameter_count
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.model.params import abstract_params
from jaxgpt.plan.estimate import estimate
from jaxgpt.plan.microbatch import trace
from jaxgpt.plan.one_device import one_device
from jaxgpt.plan.rollout import rollout
from jaxgpt.plan.topology import parse_topology
from jaxgpt.plan.train_step import compile_step
from jaxgpt.plan.work import NEXT_TOKEN
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
    monkeypatch.setattr("jaxgpt.plan.train_step.devices_of", lambda topology: jax.devices()[:8])
    run, work = work_of(config("dpo", reference_log_p=computed))
    step = compile_step(run, V5E, work=work)
    guess = estimate(run, V5E, work)
    for kind in ("parameters", "optimizer", "batch"):
        assert step.memory[kind] == guess.memory[kind]
    assert step.model_flops == guess.model_flops
    assert step.executable is not None


TEACHER = small("llama", n_embd=96, n_head=4, block_size=64, vocab_size=512, n_layer=3)


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a larger model, without checkpoints."""
    monkeypatch.chdir(tmp_path)
    Path("teacher/checkpoints").mkdir(parents=True)
    Path("teacher/tokenizer.json").write_text(CharTokenizer([*"ab"]).to_json())
    Path("teacher/config.json").write_text(to_json(Config(model=TEACHER)))


def distilled(objective: str = "distill", lora: int = 0, **post: Any) -> Config:
    return config(objective, lora, reference="teacher", **post)


def weight_bytes(model: ModelConfig) -> float:
    return 4.0 * parameter_count(abstract_params(model))


def test_a_teacher_is_held_and_computes_a_forward_pass(teacher: None) -> None:
    text = cost(config())
    student = cost(distilled())
    assert student.model_flops == text.model_flops
    assert student.memory["parameters"] == text.memory["parameters"] + weight_bytes(TEACHER)
    assert student.memory["optimizer"] == text.memory["optimizer"]
    # A forward pass has a third of the products of training.
    of_teacher = cost(replace(config(), model=TEACHER)).computed_flops
    assert student.computed_flops == pytest.approx(text.computed_flops + of_teacher / 3, rel=0.01)


def test_layers_of_a_teacher_are_extrapolated(teacher: None) -> None:
    run, work = work_of(distilled())
    assert work.teacher is not None
    deep = work.with_teacher_layers(5)
    traced = trace(one_device(run), V5E.target, deep.on_one_device(run), run.model.n_layer)
    assert estimate(run, V5E, deep).computed_flops == pytest.approx(traced.flops, rel=1e-6)


def test_the_weights_of_a_teacher_are_gathered_once(teacher: None) -> None:
    wide = replace(distilled(), mesh=MeshConfig(data=1, fsdp=8))
    rows = {each.site: each for each in cost(wide).collectives}
    once = rows["weights of the reference"]
    table = TEACHER.vocab_size * TEACHER.n_embd
    width = 2 if wide.train.compute_dtype == "bfloat16" else 4
    assert (once.bytes, once.times) == (width * (weight_bytes(TEACHER) / 4 - table), 1)


def test_adapters_of_a_student_hold_the_base_and_the_teacher(teacher: None) -> None:
    adapters, text = cost(distilled(lora=4)), cost(config(lora=4))
    assert adapters.memory["parameters"] == text.memory["parameters"] + weight_bytes(TEACHER)


def test_a_rollout_of_a_student_holds_the_teacher_and_scores_no_reference(teacher: None) -> None:
    student = generation(distilled("on-policy-distill", max_new_tokens=8))
    rewards = generation(config("grpo", reward=("exact",), group=8, max_new_tokens=8))
    assert student.memory["parameters"] == rewards.memory["parameters"] + weight_bytes(TEACHER)
    assert student.model_flops == rewards.model_flops
    assert student.hbm_bytes == rewards.hbm_bytes


@pytest.mark.ci
@pytest.mark.parametrize("objective", ["distill", "on-policy-distill"])
@pytest.mark.parametrize("lora", [0, 4])
def test_the_compiled_step_of_a_student_has_the_memory_of_the_estimate(
    objective: str, lora: int, teacher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is compiled for CPUs, with weights sharded along fsdp and tensor."""
    monkeypatch.setattr("jaxgpt.plan.train_step.devices_of", lambda topology: jax.devices()[:8])
    sharded = replace(distilled(objective, lora), mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    run, work = work_of(sharded)
    step = compile_step(run, V5E, work=work)
    guess = estimate(run, V5E, work)
    for kind in ("parameters", "optimizer", "batch"):
        assert step.memory[kind] == guess.memory[kind]
    assert step.model_flops == guess.model_flops
    # The compiler counts the teacher's products: elementwise operations are a few percent of such small models.
    assert step.compiled_flops == pytest.approx(guess.computed_flops, rel=0.25)


def test_plans_of_a_published_teacher() -> None:
    options = ["--post.objective", "distill", "--model.vocab-size", "50257", "--model.n-layer", "1", "--estimate"]
    told = jaxgpt("plan", "gpt2", "--topology", "h100:8", *options, "--train.steps", "4", "--post.reference", "gpt2")
    assert told.code == 0, told.err
    assert "objective  distill, teacher gpt2" in told.out

    for name, said in {
        "nowhere": "post.reference nowhere is not a run, preset or published architecture",
        "llama-3-8b": "post.reference llama-3-8b has a vocabulary of 128,256, but the student has 50,257",
    }.items():
        result = jaxgpt("plan", "gpt2", "--topology", "h100:8", *options, "--post.reference", name)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert said in result.err


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


def test_a_rollout_with_adapters_has_the_flops_of_its_merged_weights() -> None:
    """Training has fewer FLOPs with adapters, but a forward pass does not."""
    post = {"reward": ("exact",), "group": 4, "max_new_tokens": 8}
    assert generation(config("grpo", lora=4, **post)).model_flops == generation(config("grpo", **post)).model_flops


def test_devices_along_context_share_the_scored_tokens() -> None:
    post = {"reward": ("exact",), "group": 4, "max_new_tokens": 8}
    scoring = []
    for context in (1, 2):
        mesh = MeshConfig(data=4, context=context)
        without, scored = (replace(config("grpo", kl=kl, **post), mesh=mesh) for kl in (0.0, 0.1))
        scoring.append(generation(scored).model_flops - generation(without).model_flops)
    assert scoring[1] == scoring[0] / 2 > 0


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


def test_two_rollouts_are_compared_apart_from_the_steps() -> None:
    options = ["--post.objective", "grpo", "--post.reward", "exact", "--data.tokenizer", "gpt2"]
    options += ["--model.vocab-size", "512", "--model.n-layer", "1", "--estimate"]
    told = jaxgpt("plan", "gpt2", "--topology", "v5e:2x4", *options, "--against", "--mesh.fsdp 8 --mesh.data 1")
    assert told.code == 0, told.err
    steps, rollouts = told.out.split("\nestimates of a rollout, per device, lower bounds\n")
    assert "step with full overlap, ms" in steps
    assert "rollout with full overlap, ms" in rollouts
    assert "rollout with" not in steps
    assert "step with" not in rollouts


def test_the_row_of_a_plan_is_the_row_of_a_run() -> None:
    run, work = work_of(config("dpo", reference_log_p="every-step"))
    assert work.rows is not None
    assert work.rows().shape == (0, 2, 64, 3)
    assert run.post == PostConfig()
    assert work_of(config()) == (config(), NEXT_TOKEN)
