"""A train step and a decode step compiled for an H100, without one, meet a checklist of fast programs.

Needs JAX's CUDA plugin: `pip install -e '.[cuda13]'`, 2 GB. CI does not install it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from helpers import small

from jaxgpt.config import Config, MeshConfig, TrainConfig
from jaxgpt.kernels import GPU, best
from jaxgpt.ops import NormFn, Ops
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.plan.collectives import COLLECTIVES
from jaxgpt.plan.compilers import compiler_missing, devices_of
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.decode import compile_decode
from jaxgpt.plan.estimate import estimate
from jaxgpt.plan.hlo import Instruction, array_bytes, read_computations
from jaxgpt.plan.program_text import read_program
from jaxgpt.plan.topology import parse_topology
from jaxgpt.plan.train_step import compile_step
from jaxgpt.trainer.build import make_program
from jaxgpt.trainer.given import ProgramParts

ROWS, LAYERS = 4, 2
H100 = parse_topology("h100:1")
pytestmark = pytest.mark.skipif(bool(compiler_missing(H100)), reason="JAX's CUDA plugin is not installed")


def config(devices: int, **changes: Any) -> Config:
    sizes = {"n_embd": 256, "n_head": 4, "block_size": 128, "vocab_size": 8192, "n_layer": LAYERS} | changes
    train = TrainConfig(batch_size=ROWS * devices, compute_dtype="bfloat16")
    return Config(model=small("gpt2", **sizes), train=train, mesh=MeshConfig(data=1, fsdp=devices))


def instructions(devices: int, norm: NormFn = GPU.norm, **changes: Any) -> list[Instruction]:
    """Return the instructions of a step in the order of the schedule, without the instructions in fusions."""
    return instructions_of(config(devices, **changes), devices, norm)


def instructions_of(run: Config, devices: int, norm: NormFn = GPU.norm) -> list[Instruction]:
    mesh = make_mesh(run.mesh, devices_of(parse_topology(f"h100:{devices}")))
    program = make_program(run, mesh, ProgramParts(ops=best(run, mesh)._replace(norm=norm)))
    text = program.lower(program.abstract.state, program.batches.abstract()).compile().as_text()
    computations, entry = read_computations(text)
    return list(computations[entry].values())


def test_a_step_has_one_attention_call_a_layer_and_direction_and_no_large_copies() -> None:
    step, model = instructions(1), config(1).model
    calls = Counter(each.find(r'custom_call_target="([^"]*)"') for each in step if each.opcode == "custom-call")
    assert calls == {"__cudnn$fmhaSoftmax": LAYERS, "__cudnn$fmhaSoftmaxBackward": LAYERS}
    made = [each for each in step if each.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast")]
    logits = ROWS * model.block_size * model.vocab_size
    largest = max(size for each in made for size in array_bytes(" ".join(re.findall(r"f32\[[\d,]*\]", each.shape))))
    assert largest < 4 * logits, "float32 logits in memory"
    moved = [each.shape for each in made if "transpose" in each.name or each.opcode in ("copy", "transpose")]
    D, F, V = model.n_embd, model.mlp_width, model.vocab_size
    weights = {f"[{a},{b}]" for a, b in ((D, D), (D, F), (F, D), (V, D), (D, V))}
    assert not [shape for shape in moved if any(size in shape for size in weights)], "transposes of weights"


def test_the_gradients_of_norms_store_no_float32_copies() -> None:
    """With the definition, the gradient of each norm stores one; if a new XLA needs no copy, `kernels.norms` is unnecessary."""

    def copies(norm: NormFn) -> int:
        return sum(
            each.opcode == "fusion" and each.shape.startswith(f"f32[{ROWS},128,256]") for each in instructions(1, norm)
        )

    assert copies(GPU.norm) <= copies(Ops().norm) - 2 * LAYERS


def test_collectives_are_asynchronous_and_weights_are_gathered_during_products() -> None:
    step = instructions(4, n_embd=768, n_head=12, vocab_size=50304)
    assert not [each.name for each in step if each.opcode in COLLECTIVES]
    done = {each.operands[0]: i for i, each in enumerate(step) if each.opcode == "all-gather-done"}
    gathers = [step[i + 1 : done[each.name]] for i, each in enumerate(step) if each.opcode == "all-gather-start"]
    assert any("dot" in other.name or other.opcode == "custom-call" for between in gathers for other in between)


def test_a_decode_step_reads_the_weights_as_they_are_and_updates_the_cache_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(
        "jaxgpt.plan.compiled.read_program", lambda text, mesh: texts.append(text) or read_program(text, mesh)
    )
    monkeypatch.setattr("jaxgpt.plan.compiled.QUICK", {})
    run = config(1)
    compile_decode(run, H100)
    computations, entry = read_computations(texts[0])
    [loop] = [each for each in computations[entry].values() if each.opcode == "while"]
    step = computations[loop.find(r"body=%?([\w.-]+)")].values()
    made = [each for each in step if each.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast")]
    assert not [each.name for each in made if each.opcode in ("copy", "transpose")]
    model, sizes = run.model, Counter(each.shape.split("{")[0] for each in made)
    D, F, V, H = model.n_embd, model.mlp_width, model.vocab_size, model.head_width
    weights = {f"[{a},{b}]" for a, b in ((D, D), (D, F), (F, D), (V, D), (D, V))}
    assert not [shape for shape in sizes if any(size in shape for size in weights)], "conversions of weights"
    cache = {f"bf16[{ROWS},{model.n_head},{a},{b}]" for a, b in ((model.block_size, H), (H, model.block_size))}
    assert {shape: sizes[shape] for shape in cache} == dict.fromkeys(cache, LAYERS), "one update of the cache a layer"
    assert not [shape for shape in sizes if f"f32[{ROWS},{D}]" in shape], "residual stream in float32"


def test_plans_of_a_step_and_of_decoding() -> None:
    topology = parse_topology("h100:4")
    run = config(4)
    step, implied = compile_step(run, topology), estimate(run, topology)
    assert step.fits
    assert step.memory["parameters"] == implied.memory["parameters"]
    assert step.traffic["all-to-all"].sent == pytest.approx(implied.traffic["all-to-all"].sent, rel=1e-3)
    assert step.hbm_bytes == implied.hbm_bytes
    token = compile_decode(replace(run, train=replace(run.train, scan_layers=True)), topology)
    assert token.hbm_bytes == token.memory["parameters"] + token.memory["cache"]
    assert token.memory["float32 parameters"] > 1.9 * token.memory["parameters"]


EXPERTS: dict[str, Any] = {"n_experts": 8, "experts_per_token": 2, "bias": False, "n_inner": 512, "vocab_size": 512}


def test_experts_multiply_only_tiles_of_chosen_pairs() -> None:
    """`ragged_dot` would copy the pairs for each expert, and multiply them by all matrices."""
    pairs = ROWS * 128 * EXPERTS["experts_per_token"]
    shapes = " ".join(each.shape for each in instructions(1, **EXPERTS))
    assert re.search(r"\[24,64,512\]", shapes), "tiles of hidden units"
    assert not re.findall(rf"\[8,{pairs},\d+\]|\[{pairs},8,\d+\]", shapes)


def test_devices_exchange_the_tokens_of_experts() -> None:
    topology = parse_topology("h100:4")
    run = replace(config(4, **EXPERTS), mesh=MeshConfig(data=1, expert=4))
    step, implied = compile_step(run, topology), estimate(run, topology)
    assert "all-to-all" not in step.traffic
    assert sent(step, "expert") == pytest.approx(sent(implied, "expert"), rel=0.02)
    assert step.total == pytest.approx(implied.total, rel=0.25)


@pytest.mark.parametrize("attention", ["gathered", "ring"])
def test_devices_exchange_keys_along_context_and_store_no_scores(attention: str) -> None:
    topology = parse_topology("h100:4")
    run = config(1, block_size=8192, vocab_size=512)
    run = replace(run, train=replace(run.train, batch_size=1, attention=attention), mesh=MeshConfig(data=1, context=4))
    step, implied = compile_step(run, topology), estimate(run, topology)
    expected = sent(implied, "context")
    if attention == "ring":  # the compiler converts the gradients to bfloat16 before the last move
        elements = LAYERS * 2 * 8192 // 4 * run.model.n_embd  # keys and values of a device
        expected -= 2 * elements
    assert sent(step, "context") == pytest.approx(expected, rel=0.001)
    assert step.memory["temporaries"] < 4 * 2048 * 8192 * 4  # scores of a device in float32


def sent(cost: StepCost, axis: str) -> float:
    """Return the bytes that a device sends along an axis of the mesh, without all-reduces of gradients."""
    found = [each for each in cost.collectives if each.axes == (axis,) and each.kind != "all-reduce"]
    return sum(each.sent * each.times for each in found)
