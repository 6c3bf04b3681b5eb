"""Comparisons of plans: two plans in columns, all meshes, the smallest slice that fits, published architectures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers import jaxgpt, small

from jaxgpt.cli.plan_case import Case
from jaxgpt.config import Config, MeshConfig, TrainConfig
from jaxgpt.counts import parameter_count
from jaxgpt.model.params import abstract_params
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.plan.collectives import Collective, merged
from jaxgpt.plan.cost import StepCost, collective_seconds
from jaxgpt.plan.estimate import estimate, resolve_mesh
from jaxgpt.plan.fitting import smallest_slice
from jaxgpt.plan.meshes import meshes
from jaxgpt.plan.shapes import SHAPES, shape_config
from jaxgpt.plan.topology import CHIPS, larger_slices, parse_topology

V5E = parse_topology("v5e:2x4")
RUN = Config(
    model=small("gpt2", n_embd=32, n_head=4, block_size=16, vocab_size=64, n_layer=1),
    train=TrainConfig(batch_size=16),
    mesh=MeshConfig(data=8),
)
FLAGS = ["python-char", "--topology", "v5e:2x4", "--model.n-layer", "1", "--model.n-embd", "32", "--estimate"]


@pytest.mark.ci
def test_all_meshes_are_sorted_by_time_and_those_that_fit_come_first() -> None:
    found = meshes(RUN, V5E)
    assert all(math.prod(sizes_of(choice.mesh).values()) == 8 for choice in found)
    assert len({choice.flags for choice in found}) == len(found) > 5
    keys = [(not each.cost.fits, each.cost.bounds(V5E.chip)["seconds_serial"]) for each in found]
    assert keys == sorted(keys)
    one = next(choice for choice in found if choice.mesh == MeshConfig(data=2, fsdp=2, tensor=2))
    assert one.cost == estimate(replace(RUN, mesh=one.mesh), V5E)
    assert one.flags == "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2"


def test_meshes_that_the_model_or_the_batch_forbid_are_left_out() -> None:
    few = replace(RUN, train=TrainConfig(batch_size=2))
    found = [choice.mesh for choice in meshes(few.with_model(n_head=4), V5E)]
    assert {mesh.tensor for mesh in found} == {4}


@pytest.mark.parametrize(("window", "most"), [(4096, 1), (8192, 2)])
def test_only_long_windows_are_divided(window: int, most: int) -> None:
    found = meshes(RUN.with_model(block_size=window), parse_topology("h100:2"))
    assert max(choice.mesh.context for choice in found) == most


@pytest.mark.parametrize(
    ("options", "attention"),
    [
        ([], "splash, without stored T x T scores"),
        (["--mesh.context", "2"], "gathered, without stored T x T scores"),
        (["--mesh.context", "2", "--train.attention", "ring"], "ring, without stored T x T scores"),
        (["--train.attention", "xla"], "xla, with all T x T scores in memory"),
    ],
    ids=str,
)
def test_a_plan_names_the_attention_of_the_chip(options: list[str], attention: str) -> None:
    told = jaxgpt("plan", *FLAGS, *options)
    assert told.code == 0, told.err
    assert f"attention  {attention}\n" in told.out
    assert told.out.endswith("omit it to compile\n")


@pytest.mark.ci
def test_meshes_of_a_slice_command() -> None:
    told = jaxgpt("plan", *FLAGS, "--meshes")
    assert told.code == 0, told.err
    rows = told.out.split("MFU at most\n")[1].splitlines()
    figures = jaxgpt("plan", *FLAGS, "--meshes", "--json").json
    assert [row.split("  ")[0] for row in rows] == [each["flags"] for each in figures["meshes"]]
    assert figures["fits"]
    assert "omit --against and --decode" in jaxgpt("plan", *FLAGS, "--meshes", "--decode").err


def test_two_plans_in_columns() -> None:
    told = jaxgpt("plan", *FLAGS, "--mesh.fsdp", "8", "--against", "--mesh.fsdp 4 --mesh.tensor 2")
    assert told.code == 0, told.err
    lines = {line.split("  ")[0]: line.split() for line in told.out.splitlines()}
    figures = jaxgpt("plan", *FLAGS, "--mesh.fsdp", "8", "--against", "--mesh.fsdp 4 --mesh.tensor 2", "--json").json
    this, other = (plan["train"] for plan in figures["plans"])
    assert this == jaxgpt("plan", *FLAGS, "--mesh.fsdp", "8", "--json").json["train"]
    assert other == jaxgpt("plan", *FLAGS, "--mesh.fsdp", "4", "--mesh.tensor", "2", "--json").json["train"]
    assert lines["links, ms"][2:4] == [f"{1e3 * each['seconds']['links']:.2f}" for each in (this, other)]
    assert "all-reduce along tensor, ms" in told.out


def test_times_of_a_program_that_exhausts_memory_are_empty_in_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are unknown, not 0, so there is no difference to them."""

    def parts(case: Case) -> dict[str, StepCost]:
        cost = estimate(case.config, case.topology, case.work)
        return {"train": replace(cost, out_of_memory=case.config.mesh.tensor == 2)}

    monkeypatch.setattr("jaxgpt.cli.plan.estimate_parts", parts)
    told = jaxgpt("plan", *FLAGS, "--against", "--mesh.fsdp 4 --mesh.tensor 2")
    assert told.code == 1
    [row] = [line.split() for line in told.out.splitlines() if line.startswith("compute, ms")]
    assert len(row) == 3  # label in two words, and the time of this plan


def test_another_topology_to_compare() -> None:
    figures = jaxgpt("plan", *FLAGS, "--against", "--topology v6e:2x4", "--json").json
    assert [plan["topology"] for plan in figures["plans"]] == ["v5e:2x4", "v6e:2x4"]


def test_a_decode_step_to_compare_needs_the_compilers_of_both_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jaxgpt.plan.compilers.compiler_missing", lambda topology: "" if topology.chip.tpu else "no GPUs"
    )
    told = jaxgpt("plan", *FLAGS[:-1], "--decode", "--against", "--topology a100:8")
    assert told.code == 2
    assert told.err == "jaxgpt: --decode needs the compiler: no GPUs\n"


@pytest.mark.parametrize(
    ("against", "says"),
    [
        ("--mesh.tenser 2", "Unknown option: --mesh.tenser"),
        ("--mesh.tensor 3", "mesh.tensor 3 does not divide"),
        ("--json", "--against takes settings"),
        ("--mesh.tensor 2 --help", "--against takes settings"),
        ("'", "No closing quotation"),
    ],
)
def test_invalid_options_to_compare(against: str, says: str) -> None:
    told = jaxgpt("plan", *FLAGS, "--against", against)
    assert told.code == 2
    assert says in told.err
    assert told.err.count("\n") == 1


@pytest.mark.ci
def test_the_smallest_slice_that_fits_is_named_if_nothing_fits() -> None:
    figures = jaxgpt("plan", "llama-3-8b", "--topology", "v5e:1x1", "--estimate", "--json").json
    assert not figures["fits"]
    assert all(each["total"] > 15.75 * 2**30 for each in figures["suggestions"])
    assert "Nothing fits on v5e:1x1. The smallest slice that fits: --topology v5e:" in figures["larger"]
    words = figures["larger"].split("fits: ")[1].split()
    assert jaxgpt("plan", "llama-3-8b", *words, "--estimate").code == 0

    # The slice before it does not fit with the same options.
    slice_ = parse_topology(words[1])
    grids = [V5E, *larger_slices(V5E)]
    smaller = max((each for each in grids if each.n_devices < slice_.n_devices), key=lambda each: each.n_devices)
    config = shape_config("llama-3-8b")
    train = replace(config.train, remat="full", accumulation=64)
    run, _ = resolve_mesh(replace(config, train=train, mesh=MeshConfig(data=-1, fsdp=-1)), smaller)
    assert not estimate(run, smaller).fits


def test_no_slice_of_a_machine_fits() -> None:
    config = shape_config("llama-3-70b")
    run = config.with_model(n_layer=1000)
    assert smallest_slice(run, parse_topology("l4:4")) is None


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    one, two = (parameter_count(abstract_params(replace(SHAPES[name].model, n_layer=layers))) for layers in (1, 2))
    assert one + (SHAPES[name].model.n_layer - 1) * (two - one) == SHAPES[name].parameters


@pytest.mark.ci
def test_a_shape_is_only_for_plans() -> None:
    told = jaxgpt("plan", "llama-3.2-1b", "--topology", "v5p:4x4x4", "--mesh.fsdp", "-1", "--estimate")
    assert told.code == 0, told.err
    assert "no recipe or data" in told.out
    assert " steps: " not in told.out
    assert "no preset, run or file 'llama-3.2-1b'" in jaxgpt("train", "llama-3.2-1b").err
    assert "did you mean llama-3-8b?" in jaxgpt("plan", "llama3-8b", "--topology", "v5e:4x4").err


def test_one_dimension_of_a_torus_has_a_part_of_the_links() -> None:
    one = Collective("collective-permute", 600e9, 2, times=2)
    assert collective_seconds(one, CHIPS["v5p"]) == (2, 6)
    assert collective_seconds(one, CHIPS["v5e"]) == (6, 12)
    assert collective_seconds(one, CHIPS["h100"]) == pytest.approx((1200 / 450, 1200 / 450))
    between = one._replace(between_slices=True)
    assert collective_seconds(between, CHIPS["v5p"]) == (1200 / 6.25, 1200 / 6.25)


def test_collectives_of_one_place_are_joined_without_losing_bytes() -> None:
    one = Collective("all-gather", 8, 4, 3, axes=("fsdp",), site="weights")
    rows = [one, one._replace(bytes=2, times=1), one._replace(site="other", bytes=100)]
    joined = merged(rows)
    assert [each.site for each in joined] == ["other", "weights"]
    assert sum(each.sent * each.times for each in joined) == sum(each.sent * each.times for each in rows)
    assert joined[1].times == 4


@pytest.mark.parametrize("mesh", [MeshConfig(data=8), MeshConfig(data=2, fsdp=4)])
def test_the_bytes_that_every_program_sends_do_not_depend_on_the_number_of_microbatches(mesh: MeshConfig) -> None:
    """A program may sum the gradients once per step, of all groups of weights, and keep the gathered weights."""
    bounds = []
    for accumulation in (1, 64):  # 8 microbatches on each device
        run = replace(RUN, mesh=mesh, train=TrainConfig(batch_size=128, accumulation=accumulation))
        bounds.append(estimate(run, V5E).least["links"])
    assert bounds[0] > 0
    assert bounds[1] == pytest.approx(bounds[0])
