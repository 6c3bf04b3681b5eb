"""Estimates equal what real programs place, compute and send; with libtpu, also what its compiler reports."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from dataclasses import replace

import jax
import pytest
from helpers import jaxgpt, small
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.cli.plan_tables import table
from jaxgpt.config import Config, LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.counts import flops_per_token
from jaxgpt.errors import UserError
from jaxgpt.ops.activations import ACTIVATIONS
from jaxgpt.plan.abstract import abstract_program
from jaxgpt.plan.collectives import Collective, traffic_by_kind
from jaxgpt.plan.compiled import _parse_exhausted
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.counts import counts_of
from jaxgpt.plan.decode import compile_decode
from jaxgpt.plan.estimate import estimate, resolve_mesh
from jaxgpt.plan.fitting import suggestions
from jaxgpt.plan.kernel import product_flops
from jaxgpt.plan.microbatch import pair_rows, trace
from jaxgpt.plan.program_text import read_program
from jaxgpt.plan.topology import CHIPS, parse_topology
from jaxgpt.plan.train_step import compile_step
from jaxgpt.presets import preset
from jaxgpt.trainer.build import build
from jaxgpt.trainer.program import Program

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
FLAGS = ["--topology", "v5e:2x4", "--mesh.fsdp", "4", "--model.n-layer", "2", "--model.n-embd", "32"]


def config(mesh: MeshConfig, **changes: object) -> Config:
    base = {"n_embd": 32, "block_size": 16, "vocab_size": 64, "tie_embeddings": False}
    model = small("gpt2", **(base | changes))
    return Config(model=model, train=TrainConfig(batch_size=16), mesh=mesh)


def lowered(program: Program) -> jax.stages.Lowered:
    return program.lower(program.abstract.state, program.batches.abstract())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mesh", "optimizer", "rank"),
    [
        ((2, 2, 2), "muon", 0),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (((1, 8, 1), "adamw", 0), ((2, 2, 2), "adamw", 4))),
    ],
)
def test_state_is_counted_exactly(mesh: tuple[int, int, int], optimizer: str, rank: int) -> None:
    """The estimated bytes of parameters, optimizer and EMA equal the bytes of a real state on a device."""
    run = config(MeshConfig(data=mesh[0], fsdp=mesh[1], tensor=mesh[2]), n_layer=3)  # more layers than are traced
    optim = OptimConfig(name=optimizer, ema_decay=0.9)  # type: ignore[arg-type]
    run = replace(run, optim=optim, lora=LoraConfig(rank=rank))
    program = build(run)
    state = program.init()
    figures = estimate(resolve_mesh(run, parse_topology("v5e:2x4"))[0], parse_topology("v5e:2x4"))
    params = (state.params, program.frozen)
    for kind, tree in {"parameters": params, "optimizer": state.opt_state, "average": state.ema}.items():
        real = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert figures.memory[kind] == real


@pytest.mark.ci
def test_a_data_parallel_step_sends_the_gradients() -> None:
    """With data parallelism only, a step sends one sum of the gradients and a few scalars."""
    program = build(config(MeshConfig(data=8, fsdp=1, tensor=1)))
    collectives, _ = read_program(lowered(program).compile().as_text())
    gradients = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.abstract.state.params))
    traffic = traffic_by_kind(collectives)
    assert set(traffic) == {"all-reduce"}
    assert gradients <= traffic["all-reduce"].bytes <= gradients + 64
    implied = estimate(program.config, parse_topology("v5e:2x4")).traffic
    assert implied["all-reduce"].sent == pytest.approx(traffic["all-reduce"].sent, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 2])
def test_flops_formula_equals_the_compiled_count(rank: int) -> None:
    """The count of an unrolled, unoptimized program is a few percent higher, because of norms and softmax."""
    run = config(MeshConfig(data=1), n_embd=256, n_head=2, vocab_size=512, block_size=64)
    program = build(replace(run, lora=LoraConfig(rank=rank)))
    counted = lowered(program).cost_analysis()["flops"]  # type: ignore[index]
    model = program.config.model
    T, lora = model.block_size, LoraConfig(rank=rank)
    formula = flops_per_token(model, program.abstract.weights, T, lora) * 16 * T
    assert counted == pytest.approx(formula, rel=0.06)


@pytest.mark.ci
@pytest.mark.parametrize(("changes", "share"), [({}, 1), ({"vocab_size": 1025}, 0.4), ({"n_kv_head": 1}, 0.95)])
def test_flops_that_tensor_does_not_divide_are_counted_on_each_device(changes: dict[str, int], share: float) -> None:
    sizes = {"n_embd": 64, "vocab_size": 1024, "block_size": 64, "n_head": 4, "n_layer": 1}
    run = config(MeshConfig(data=1, tensor=4), **sizes | changes)
    compiled = lowered(build(run)).compile().cost_analysis()
    figures = estimate(run, parse_topology("h100:8"))
    assert compiled["flops"] == pytest.approx(figures.model_flops, rel=0.15)  # type: ignore[index]
    assert figures.useful_share == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("remat", "loss_chunk"), [("none", 0), ("full", 4)])
def test_only_the_branch_of_accelerators_takes_memory(
    remat: str, loss_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is estimated as a TPU or GPU computes it; a CPU computes it in a different way."""
    topology = parse_topology("v5e:2x4")
    run = config(MeshConfig(data=8, tensor=1), vocab_size=512)
    run = replace(run, train=replace(run.train, remat=remat, loss_chunk=loss_chunk))
    figures = estimate(run, topology)
    for cached in (abstract_program, trace, counts_of):
        cached.cache_clear()
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **others: default(*args))
    assert estimate(run, topology) == figures


def test_activation_functions_save_only_their_input() -> None:
    """They are elementwise, regardless of the primitives that a version of JAX uses."""
    run, topology = config(MeshConfig(data=8, tensor=1), n_layer=1), parse_topology("v5e:2x4")
    saved = {name: estimate(run.with_model(activation=name), topology).memory["activations"] for name in ACTIVATIONS}
    assert len(set(saved.values())) == 1, saved


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "topology", "remat", "compiled", "ratio"),
    [
        ("gpt2", "v5e:2x4", "none", 5.43, 1.03),
        pytest.param("gpt2-xl", "v5e:4x8", "dots", 7.65, 0.73, marks=pytest.mark.long),
    ],
)
def test_estimates_are_as_accurate_as_documented(
    name: str, topology: str, remat: str, compiled: float, ratio: float
) -> None:
    """The compiled totals in GiB match docs/scaling.md; the ratios match docs/tpu.md."""
    run, chips = preset(name), parse_topology(topology)
    run = replace(
        run,
        train=replace(run.train, batch_size=64, accumulation=1, remat=remat),  # type: ignore[arg-type]
        mesh=MeshConfig(fsdp=-1),
    )
    total = estimate(resolve_mesh(run, chips)[0], chips).total / 2**30
    assert total / compiled == pytest.approx(ratio, abs=0.01)


@given(
    st.sampled_from(sorted(CHIPS)),
    st.floats(1, 1e18),
    st.floats(0, 1e15),
    st.floats(0, 1e15),
    st.floats(0, 1e15),
)
def test_bounds(name: str, flops: float, moved: float, sent: float, network: float) -> None:
    exchanged = Collective("collective-permute", sent, 2), Collective("collective-permute", network, 2, 1, True)
    least = {"compute": flops / 2, "links": sent}
    figures = StepCost({}, 0.0, flops, moved, exchanged, least=least)
    bounds, seconds = figures.bounds(CHIPS[name]), figures.seconds(CHIPS[name])
    assert max(seconds.values()) == bounds["seconds_overlapped"] <= bounds["seconds_serial"]
    assert bounds["seconds_serial"] <= 4 * bounds["seconds_overlapped"] * (1 + 1e-9)
    assert 0 < bounds["mfu_serial"] <= bounds["mfu_overlapped"] <= 1
    assert bounds["seconds_least"] <= bounds["seconds_overlapped"]
    assert bounds["mfu_most"] >= bounds["mfu_overlapped"]


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(1, 1, 2), (2, 4, 1)])
def test_more_sharding_never_needs_more_memory(data: int, fsdp: int, tensor: int) -> None:
    topology = parse_topology("v5e:4x8")
    narrow, wide = (
        estimate(config(MeshConfig(data=data, fsdp=ways, tensor=tensor), positions="none"), topology).memory
        for ways in (fsdp, 2 * fsdp)
    )
    assert all(wide[kind] <= narrow[kind] for kind in narrow)
    assert wide["activations"] == narrow["activations"] / 2


@pytest.mark.parametrize("F", [128, 16])
def test_activations_between_the_collectives_of_tensor_are_divided(F: int) -> None:
    """Queries, keys, values, scores, head outputs, MLP and logits are divided, even if MLP width and window are equal.

    The residual stream and its norms are not divided.
    """
    one, two = (
        estimate(
            config(MeshConfig(data=1, tensor=t), n_layer=1, n_inner=F, positions="none"), parse_topology("h100:8")
        ).memory["activations"]
        for t in (1, 2)
    )
    D, rows = 32, 16 * 16
    whole = 4 * rows * (6 * D + 10)
    assert two - whole == pytest.approx((one - whole) / 2, rel=0.05)


def test_offloaded_products_take_no_device_memory() -> None:
    topology = parse_topology("v5e:2x4")
    run = config(MeshConfig(data=8), n_layer=4)
    sizes = {
        remat: estimate(replace(run, train=replace(run.train, remat=remat)), topology).memory["activations"]  # type: ignore[arg-type]
        for remat in ("dots", "offload", "full")
    }
    assert sizes["full"] <= sizes["offload"] < sizes["dots"]


def test_padding_lowers_mfu_but_not_time() -> None:
    topology = parse_topology("v5e:16x16", 16)
    run, note = resolve_mesh(config(MeshConfig()), topology)
    assert run.mesh.data == 4096
    assert "windows per step are padding" in note
    figures, full = estimate(run, topology), estimate(replace(run, train=replace(run.train, batch_size=4096)), topology)
    assert figures.seconds(topology.chip) == full.seconds(topology.chip)
    share = run.train.batch_size / 4096
    assert figures.bounds(topology.chip)["mfu_serial"] == pytest.approx(
        share * full.bounds(topology.chip)["mfu_serial"]
    )


def test_suggestions_are_flags_that_reduce_memory() -> None:
    topology = parse_topology("v5e:2x4")
    run, _ = resolve_mesh(config(MeshConfig(data=8)), topology)
    now = estimate(run, topology).total
    offered = suggestions(run, topology)
    assert {"--train.remat", "--train.accumulation", "--mesh.data"} <= {flags.split()[0] for flags, _ in offered}
    assert [total for _, total in offered] == sorted(total for _, total in offered)
    assert all(total < now for _, total in offered)
    flags, total = next((f, t) for f, t in offered if f.startswith("--mesh"))
    wide = MeshConfig(data=int(flags.split()[1]), fsdp=int(flags.split()[3]), tensor=1)
    assert estimate(replace(run, mesh=wide), topology).total == total


@pytest.mark.ci
def test_a_combination_is_suggested_if_no_single_option_fits() -> None:
    run = config(MeshConfig(data=8))
    smallest = suggestions(run, parse_topology("custom:8,peak=1T,hbm=1G,bandwidth=1G"))[0][1]
    tiny = parse_topology(f"custom:8,peak=1T,hbm={0.8 * smallest / 1e9:.6f}G,bandwidth=1G")
    flags, total = suggestions(run, tiny)[0]
    assert len(flags.split()) > 4
    assert total <= tiny.chip.hbm
    none = parse_topology("custom:8,peak=1T,hbm=0.000001G,bandwidth=1G")
    assert all(total > none.chip.hbm for _, total in suggestions(run, none))


def test_traffic_between_slices_uses_the_network() -> None:
    topology = parse_topology("v5e:2x4", 2)
    run, _ = resolve_mesh(config(MeshConfig(data=4, fsdp=4, tensor=1)), topology)
    traffic = estimate(run, topology).traffic["all-reduce"]
    part = 4 * sum(leaf.size for leaf in jax.tree.leaves(build(config(MeshConfig(data=1))).abstract.state.params)) / 4
    assert traffic.sent_between_slices == pytest.approx(Collective("all-reduce", part / 2, 2).sent)
    with pytest.raises(UserError, match=r"not a multiple of --slices 2.* use --mesh.data 2 "):
        resolve_mesh(config(MeshConfig(data=1, fsdp=16, tensor=1)), topology)


def test_out_of_memory_messages_are_parsed() -> None:
    assert _parse_exhausted("Ran out of memory in memory space hbm. Used 40.5G of 15.75G hbm.") == (
        40.5 * 2**30,
        15.75 * 2**30,
    )
    text = "the total memory required for HLO temporaries (512.00G) exceeds available HBM (30.75G)."
    assert _parse_exhausted(text) == (512 * 2**30, 30.75 * 2**30)
    with pytest.raises(UserError, match="something else"):
        _parse_exhausted("something else")


def test_the_command_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jaxgpt.plan.compilers.compiler_missing", lambda topology: "libtpu is not installed: pip install"
    )
    told = jaxgpt("plan", "python-char", *FLAGS)
    assert told.code == 0, told.err
    assert "estimate" in told.out
    assert "not compiled: libtpu is not installed" in told.out
    figures = jaxgpt("plan", "python-char", *FLAGS, "--json").json
    assert figures["fits"]
    assert not figures["train"]["compiled"]
    assert figures["mesh"] == {"data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_nothing_is_counted_without_a_program(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compiler runs out of memory, `plan` prints its number of bytes, but no traffic, time or MFU."""

    def refuse(*args: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory. Used 40.50G of 15.75G hbm.")

    monkeypatch.setattr("jaxgpt.plan.train_step.devices_of", lambda topology: jax.devices()[:8])
    monkeypatch.setattr(Program, "lower", refuse)
    run, topology = config(MeshConfig(data=8, tensor=1)), parse_topology("v5e:2x4")
    cost = compile_step(replace(run, train=replace(run.train, accumulation=8 * microbatches)), topology)
    rows = table(cost, topology).splitlines()
    assert "40.500 GiB of 15.75 GiB: DOES NOT FIT" in rows[-1]
    assert [row.split()[0] for row in rows] == ["parameters", "optimizer", "batch", "temporaries", "total"]
    values = json.loads(json.dumps(cost.to_json(topology.chip)))
    assert not values["fits"]
    unknown = {name for name, value in values.items() if value is None}
    assert unknown == {"hbm_bytes", "traffic", "collectives", "compiled_flops", "loops_once", "seconds", "bounds"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("attention", "window", "pattern"),
    [
        ("gathered", 0, "L"),
        ("halo", 5, "L"),
        ("gathered", 3, "LG"),  # a halo before each chunk, and gathered keys
        pytest.param("ring", 0, "L", marks=pytest.mark.long),
        pytest.param("ring", 3, "LG", marks=pytest.mark.long),
    ],
)
def test_the_traffic_of_keys_along_context(attention: str, window: int, pattern: str) -> None:
    """Keys and values move as often as estimated; gradients of weights are all-reduced."""
    layers = {"n_layer": 2, "n_kv_head": 2, "sliding_window": window, "window_pattern": pattern}
    run = config(MeshConfig(data=1, context=4), positions="none", **layers)
    run = replace(run, train=TrainConfig(batch_size=2, attention=attention))  # type: ignore[arg-type]
    # JAX gives all collectives of a kernel one channel.
    text = re.sub(r"channel_id=\d+", "", lowered(build(run)).compile().as_text())
    # Estimates omit the positions of a row, int32, which rings gather.
    sent_arrays = [each for each in read_program(text)[0] if each.bytes != 4 * run.window]
    found = traffic_by_kind(sent_arrays)
    implied = estimate(run, parse_topology("v5e:2x2")).traffic
    assert set(found) == set(implied)
    sent = {kind: each.sent for kind, each in implied.items()}
    if attention == "gathered":
        sent["all-gather"] /= 2  # XLA removes optimization barriers on a CPU, and merges the gathers of both passes
    if attention == "halo":
        sent["collective-permute"] *= 2 / 3  # and the sends of both passes
    for kind, traffic in found.items():
        assert traffic.sent == pytest.approx(sent[kind], rel=0.05), kind


@pytest.mark.ci
def test_the_head_is_gathered_for_each_chunk_of_logits() -> None:
    """Its gradient is summed for each chunk, too. On a CPU, XLA gathers the head once in the forward pass."""
    run = config(MeshConfig(data=1, fsdp=4), n_layer=1, vocab_size=512, tie_embeddings=False, positions="none")
    run = replace(run, train=replace(run.train, loss_chunk=4, compute_dtype="float32"))
    program = read_program(lowered(build(run)).compile().as_text())[0]
    found = {each.kind: each for each in program if each.site == "lm_head, backward" and each.times > 1}
    implied = estimate(run, parse_topology("v5e:2x2")).collectives
    further = {each.kind: each for each in implied if each.site == "head, for each chunk"}
    chunks = run.window // 4
    assert [found[kind].times for kind in ("all-gather", "all-reduce")] == [chunks, chunks]
    assert further["all-gather"].times == 2 * (chunks - 1)
    assert further["reduce-scatter"].times == chunks - 1
    assert further["all-gather"].bytes == found["all-gather"].bytes
    assert further["reduce-scatter"].bytes == found["all-reduce"].bytes / 4  # the result is a shard


def test_activations_are_divided_along_context() -> None:
    """With the scores of XLA's attention, `T / context x T`; without them, activations and gathered keys are linear in T."""

    def activations(T: int, context: int, attention: str) -> float:
        run = config(MeshConfig(data=1, context=context), block_size=T, positions="none")
        run = replace(run, train=TrainConfig(batch_size=1, attention=attention))  # type: ignore[arg-type]
        return estimate(run, parse_topology("v5e:2x4")).memory["activations"]

    assert activations(512, 4, "xla") == pytest.approx(activations(512, 1, "xla") / 4)
    by_four = activations(512, 4, "gathered")
    keys = 2 * 512 * 32 * (4 + 4)  # keys and values in float32, and their gradients
    assert activations(1024, 4, "gathered") == pytest.approx(2 * by_four)
    assert 2 * activations(512, 8, "gathered") - by_four == pytest.approx(keys)


@pytest.mark.ci
def test_a_halo_sends_the_window_not_the_row() -> None:
    """The traffic of a sliding window depends on the window, and not on the number of devices."""

    def sent(attention: str, context: int) -> float:
        run = config(MeshConfig(data=1, context=context), block_size=8192, sliding_window=1024, positions="none")
        run = replace(run, train=TrainConfig(batch_size=1, attention=attention))  # type: ignore[arg-type]
        found = estimate(run, parse_topology("v5e:2x4")).collectives
        return sum(each.sent * each.times for each in found if "keys" in each.site)

    assert sent("halo", 4) == sent("halo", 8)
    assert sent("gathered", 8) / sent("halo", 8) == pytest.approx(7)


@pytest.mark.ci
def test_a_plan_with_own_sharding_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that are split along the sequence are gathered. The step is compiled for CPUs."""
    monkeypatch.setattr("jaxgpt.plan.train_step.devices_of", lambda topology: jax.devices()[:2])
    run, topology = config(MeshConfig(data=1, tensor=2), n_layer=1), parse_topology("v5e:2x2")
    assert "all-gather" in compile_step(run, topology, rules={"length": ("tensor",)}).traffic
    with pytest.raises(UserError, match="no logical axis 'lenght'"):
        compile_step(run, topology, rules={"lenght": ("tensor",)})


def test_an_estimate_that_does_not_fit_has_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.plan.fitting._combination", lambda *_: None)
    big = ["--train.batch-size", "65536", "--model.block-size", "1024", "--json", "--estimate"]
    told = jaxgpt("plan", "python-char", *FLAGS, *big)
    assert told.code == 1
    assert told.json["not_compiled"] == "--estimate is given; omit it to compile"
    assert told.json["suggestions"]
    assert told.out.count("\n") == 1


@needs_libtpu
def test_the_tpu_compiler_divides_the_cache_by_heads() -> None:
    """A step of decoding with tensor parallelism exchanges no keys and values; the context need not divide evenly."""
    run = config(MeshConfig(data=4, fsdp=1, tensor=2), n_head=2)
    run = replace(run, model=replace(run.model, block_size=127, vocab_size=512, n_layer=1, positions="none"))
    assert "all-to-all" not in compile_decode(run, parse_topology("v5e:2x4")).traffic


@needs_libtpu
def test_the_tpu_compiler_agrees() -> None:
    """Compile for eight v5e chips: state bytes, gradient sum, FLOPs, a decode step, and a run that does not fit."""
    topology = parse_topology("v5e:2x4")
    run = config(MeshConfig(data=8, fsdp=1, tensor=1), n_head=2, norm_affine=False, bias=False)
    wide = replace(run.model, n_embd=256, vocab_size=512, block_size=128, n_layer=1, positions="none")
    run = replace(run, model=wide, train=replace(run.train, compute_dtype="bfloat16"))
    step = compile_step(run, topology)
    with warnings.catch_warnings(action="error"):
        assert compile_step(run, topology) == step, "a second plan gives no warnings about the compilation cache"
    guess = estimate(run, topology)
    assert step.compiled
    assert step.fits
    for kind in ("parameters", "optimizer"):
        assert step.memory[kind] == guess.memory[kind]
    assert step.memory["padding"] < 0.1 * (step.memory["parameters"] + step.memory["optimizer"])
    # Gradients of matrices are bfloat16 products, the table's are float32 sums; then the loss and the token count.
    assert set(step.traffic) == {"all-reduce"}
    matrices, table = run.model.n_embd * (12 * run.model.n_embd + 512), 512 * run.model.n_embd
    assert step.traffic["all-reduce"].bytes == pytest.approx(2 * matrices + 4 * table, abs=64)
    assert step.compiled_flops == pytest.approx(step.model_flops, rel=0.1)
    split = replace(run, mesh=MeshConfig(data=1, fsdp=8, tensor=1))
    sent, implied = compile_step(split, topology).traffic, estimate(split, topology).traffic
    for kind in ("reduce-scatter", "all-to-all"):
        assert sent[kind].sent == pytest.approx(implied[kind].sent, rel=1e-3)
    # With enough memory, some gathered weights are kept for the backward pass; norms are gathered as well.
    assert implied["all-gather"].sent / 2 < sent["all-gather"].sent < implied["all-gather"].sent
    token, adapted = (compile_decode(replace(run, lora=LoraConfig(rank=rank)), topology) for rank in (0, 2))
    assert (token.model_flops, token.useful_share) == (adapted.model_flops, adapted.useful_share)
    slots = 2 * 128  # two rows per device, 128 tokens each
    # Keys and values in bfloat16, the position of each slot, and the length.
    assert token.memory["cache"] == 2 * 2 * 256 * slots + 4 * slots + 4
    # Bounds of the estimate are bounds of the program.
    for cost, implied in ((step, guess), (compile_step(split, topology), estimate(split, topology))):
        assert implied.least["memory"] <= cost.hbm_bytes
        assert implied.least["links"] <= 1.001 * sum(each.sent for each in cost.traffic.values())
        assert implied.least["compute"] <= 1.01 * cost.compiled_flops + _kernel_flops(run)
    huge = replace(run, train=replace(run.train, batch_size=2**19))
    told = compile_step(huge, topology)
    assert not told.fits
    assert told.available == CHIPS["v5e"].hbm
    assert json.dumps(told.to_json(CHIPS["v5e"]))


def _kernel_flops(run: Config) -> float:
    """Return the FLOPs of the attention kernel on one of eight devices, which the compiler does not count."""
    model = run.model
    shape = (run.train.batch_size // 8, run.window, model.n_head, model.head_width)
    return 7 * model.n_layer * product_flops(shape, 0)


@pytest.mark.parametrize("shared", [1, pytest.param(0, marks=pytest.mark.long)])
def test_the_sums_of_experts_along_tensor(shared: int) -> None:
    """The compiled step sums the outputs of the experts once, and the outputs of the shared experts once."""
    run = config(
        MeshConfig(data=1, expert=2, tensor=2), n_layer=1, n_experts=4, shared_experts=shared, bias=False, mlp="gated"
    )
    program = build(run)
    compiled, _ = read_program(lowered(program).compile().as_text(), program.mesh.shape)
    guess = [each for each in estimate(run, parse_topology("v5e:2x2")).collectives if each.axes == ("tensor",)]
    forward = [each for each in compiled if each.axes == ("tensor",) and re.match("h(_0)?/", each.site)]
    forward = [each for each in forward if "backward" not in each.site]
    assert sum(each.bytes * each.times for each in guess) == 2 * sum(each.bytes * each.times for each in forward)


@pytest.mark.ci
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_experts_hold_the_pairs_of_all_devices_along_their_axis(remat: str) -> None:
    """With the same rows on each device, the activations grow by the rows for the pairs of each further device."""
    activations = []
    for experts in (1, 2, 4):
        run = config(
            MeshConfig(data=1, expert=experts), n_experts=4, experts_per_token=2, bias=False, mlp="gated", n_inner=128
        )
        run = replace(run, train=replace(run.train, batch_size=64 * experts, remat=remat))
        activations.append(
            estimate(run, parse_topology(f"custom:{experts},peak=1T,hbm=1G,bandwidth=1G,link=1G")).memory["activations"]
        )
    pairs = 64 * 16 * 2
    rows = [pair_rows(parse_topology("h100:1").target, devices * pairs, 4 // devices) for devices in (1, 2, 4)]
    assert rows[0] < rows[1] < rows[2]
    one, two, four = activations
    assert two - one > 2 * pairs * 128 * 4  # inputs of the last product, and one more array, in float32
    assert (four - one) / (two - one) == pytest.approx((rows[2] - rows[0]) / (rows[1] - rows[0]))


@needs_libtpu
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_the_tpu_compiler_needs_the_memory_of_all_pairs(remat: str) -> None:
    model = small("llama", n_layer=2, n_embd=256, n_head=2, n_kv_head=2, head_dim=128, n_inner=1024, block_size=1024)
    run = Config(
        model=replace(model, vocab_size=2048, n_experts=8, experts_per_token=2),
        train=TrainConfig(batch_size=32, compute_dtype="bfloat16", remat=remat),
        mesh=MeshConfig(data=1, fsdp=2, expert=4),
    )
    topology = parse_topology("v5p:2x2x2")
    assert estimate(run, topology).total / compile_step(run, topology).total == pytest.approx(1, abs=0.25)


@needs_libtpu
@pytest.mark.parametrize("window", [0, 256])
def test_the_tpu_compiler_sends_the_keys_of_splash_attention(window: int) -> None:
    """The step sends gathered keys, or the keys of a halo, and stores no scores."""
    model = small("llama", n_layer=1, n_head=4, n_kv_head=2, head_dim=128, n_embd=256, block_size=4096)
    run = Config(
        model=replace(model, sliding_window=window, vocab_size=512),
        train=TrainConfig(batch_size=1, compute_dtype="bfloat16"),
        mesh=MeshConfig(data=1, context=8),
    )
    topology = parse_topology("v5e:2x4")
    step, guess = compile_step(run, topology), estimate(run, topology)

    def sent(cost: StepCost) -> float:
        found = [each for each in cost.collectives if each.kind != "all-reduce"]
        return sum(each.sent * each.times for each in found)

    assert sent(step) == pytest.approx(sent(guess), rel=0.01)
    assert "splash" in step.executable.as_text()
    assert step.memory["temporaries"] < 4 * 512 * 4096 * 4  # scores of a device in float32


@needs_libtpu
def test_the_tpu_compiler_exchanges_the_tokens_of_experts() -> None:
    """The bytes sent along the axis of the experts, in both directions, match the estimate."""
    run = config(MeshConfig(data=2, fsdp=2, expert=2), n_experts=4, bias=False, mlp="gated", n_inner=128, n_head=4)
    wide = replace(run.model, n_embd=256, vocab_size=512, block_size=128, n_layer=2, positions="none")
    run = replace(run, model=wide, train=replace(run.train, compute_dtype="bfloat16"))
    topology = parse_topology("v5e:2x4")
    step, guess = compile_step(run, topology), estimate(run, topology)

    def sent(cost: StepCost, kind: str) -> float:
        found = [each for each in cost.collectives if each.axes == ("expert",) and each.kind == kind]
        return sum(each.sent * each.times for each in found)

    assert sent(step, "reduce-scatter") == pytest.approx(sent(guess, "reduce-scatter"))
    # The choices of the router and their shares are gathered as well.
    assert sent(step, "all-gather") == pytest.approx(sent(guess, "all-gather"), rel=0.05)
    assert guess.least["links"] < sum(each.sent for each in step.traffic.values())
