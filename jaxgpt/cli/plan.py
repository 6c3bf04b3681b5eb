"""jaxgpt plan TARGET --topology v5e:2x4 [--slices N] [--against OPTIONS] [--meshes] [--decode] [--estimate] [--json]"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from jaxgpt.cli.options import NO_SETTINGS, GivenSettings, Json
from jaxgpt.cli.output import aligned, columns, print_json, progress
from jaxgpt.cli.parse import parse
from jaxgpt.cli.plan_tables import difference, figures_of, mesh_row, si, table
from jaxgpt.cli.settings import named_config, with_settings, with_vocab
from jaxgpt.config import Config
from jaxgpt.errors import UserError, did_you_mean, plural
from jaxgpt.presets import PRESETS

if TYPE_CHECKING:
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.residuals import Work
    from jaxgpt.plan.topology import Topology

GIB = 2**30


def plan(
    target: str,
    /,
    *,
    topology: str,
    slices: int = 1,
    against: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    meshes: bool = False,
    decode: bool = False,
    estimate: bool = False,
    json: Json = False,
    settings: GivenSettings = NO_SETTINGS,
) -> int:
    """Plan a run for hardware you do not have: memory per device, communication, bounds on speed.

    The first table is an estimate. With a compiler, the training step is also
    compiled, and a second table shows the compiler's numbers. Compilers need Linux
    but no accelerator: pip install -e '.[tpu]' for TPUs (x86-64), '.[cuda13]' for
    one machine of H100 or H200. The exit code is 1 if the run does not fit.

    A topology is a chip and a grid: v4:2x2x2, v5e:2x4, v5p:4x4x4, v6e:4x8,
    tpu7x:2x2x1. It may also be a Google Cloud slice, named by its number of chips
    (v5e-8, v5litepod-16, v6e-8) or of TensorCores, two per chip (v5p-128, v4-32).
    GPUs are a100, b200, h100, h200, l4, l40s and mi300x, at most 8 per machine:
    h100:8 --slices 4 is four machines. For any other device, use custom with its
    specifications in FLOP/s, bytes and bytes/s:
    custom:8,peak=312T,hbm=80G,bandwidth=2039G,link=300G,network=25G

    Published shapes, without recipe or data, are llama-3.2-1b, llama-2-7b,
    llama-3-8b, llama-3-70b and mixtral-8x7b.

    jaxgpt plan gpt2 --topology v5e-8
    jaxgpt plan gpt2-xl --topology v5p:4x4x4 --mesh.fsdp -1
    jaxgpt plan runs/shakespeare --topology h100:8 --slices 4 --estimate
    jaxgpt plan llama-3-8b --topology v5p-128 --meshes
    jaxgpt plan llama-3-8b --topology v5p-128 --mesh.fsdp -1 --against "--mesh.tensor 4"

    Args:
        target: preset, published shape or run
        topology: chip and grid, such as v5e:2x4, or a Google Cloud slice, such as v5e-8
        slices: number of TPU slices or GPU machines, connected by a network
        against: also plan with these further options, such as "--mesh.tensor 4", and print both plans in columns
        meshes: estimate all meshes of the topology, fastest first, instead of one
        decode: also plan a decoding step: one token for each row of a microbatch, with a full context
        estimate: print only the estimate, do not compile
    """
    # A plan needs no devices of this machine. Without this variable, an installed libtpu would search for TPUs.
    os.environ["JAX_PLATFORMS"] = "cpu"
    case = make_case(target, topology, slices, settings)
    if meshes:
        if against or decode:
            raise UserError("--meshes prints estimates of all meshes: omit --against and --decode")
        return _print_meshes(case, json)
    why_not = _not_compiled(case, estimate)
    if decode and why_not:
        raise UserError(f"--decode needs the compiler: {why_not}")
    if against:
        other = other_case(target, topology, slices, settings, against)
        why_not = why_not or _not_compiled(other, estimate)
        return _print_comparison((case, other), against, why_not, decode, json)
    return _print_plan(case, why_not, decode, json)


def _print_plan(case: Case, why_not: str, decode: bool, json: bool) -> int:
    """Print the estimates of a plan, its compiled steps and advice; return the exit code, 1 if the run does not fit.

    As text, every part is printed as soon as it is known, because compilation takes minutes.
    """

    def show(text: str) -> None:
        if not json:
            print(text)

    chips = case.topology
    show(aligned(_head(case)))
    costs = estimates(case)
    estimated = costs["train"]
    show("\nestimate from shapes and shardings, per device and step (parameters and optimizer are exact)")
    show(table(estimated, chips, case.steps))
    if "rollout" in costs:
        show(_rollout_title(case))
        show(table(costs["rollout"], chips, unit="rollout"))

    if why_not:
        show(f"\nnot compiled: {why_not}")
    else:
        costs |= compiled(case, decode)
        show("\ncompiled training step, per device")
        show(table(costs["train"], chips, case.steps))
    if "decode" in costs:
        show("\ncompiled decode step, per device (one token per row)")
        show(table(costs["decode"], chips))

    fits = all(cost.fits for cost in costs.values())
    hints: list[tuple[str, float]] = []
    larger = ""
    if not fits:
        from jaxgpt.plan.choices import suggestions

        show("\nThe run does not fit. Options that need less memory (estimate, GiB per device):")
        hints = suggestions(case.config, chips, case.work)
        for flags, total in hints:
            verdict = "  (fits)" if total <= chips.chip.hbm else ""
            show(f"  {total / GIB:7.2f}  {flags}{verdict}")
        if not any(total <= chips.chip.hbm for _, total in hints):
            larger = _larger(case)
            show(larger)

    if json:
        about = {
            "name": case.title,
            "note": case.remark,
            "attention": case.attention,
            "fits": fits,
            "not_compiled": why_not,
            "topology": str(chips),
            "chip": chips.chip.title,
            "devices": chips.n_devices,
            "mesh": asdict(case.config.mesh),
            "suggestions": [{"flags": flags, "total": total} for flags, total in hints],
            "larger": larger,
        }
        costs = {"estimate": estimated, **costs}
        print_json(about | {name: cost.to_json(chips.chip) for name, cost in costs.items()})
    return 0 if fits else 1


class Case(NamedTuple):
    """A run on hardware."""

    title: str  # preset, shape or run
    config: Config  # settings of a step, with a resolved mesh
    topology: Topology
    work: Work
    objective: str  # name of the objective
    steps: int  # steps of the run; 0: unknown
    attention: str  # the attention of the chip, for the user
    remark: str  # note on the mesh, or ""


def make_case(target: str, topology: str, slices: int, settings: Mapping[str, Any]) -> Case:
    """Resolve the settings of a plan; raise `UserError` if they are invalid."""
    base, is_shape = _base(target)
    config = with_vocab(with_settings(base, settings))
    if config.train.epochs:
        raise UserError(
            f"train.epochs {config.train.epochs:g} needs the number of tokens, which plan does not count: "
            "use --train.steps N --train.epochs 0"
        )
    from jaxgpt.plan.estimate import resolve_mesh
    from jaxgpt.plan.topology import attention_of, parse_topology
    from jaxgpt.post.plan import work_of

    chips = parse_topology(topology, slices)
    config, remark = resolve_mesh(config, chips)
    attention = attention_of(config, chips)
    steps = 0 if is_shape and "train.steps" not in settings else config.train.steps
    step, work = work_of(config)
    return Case(
        title=target,
        config=step,
        topology=chips,
        work=work,
        objective=config.post.objective,
        steps=steps,
        attention=attention,
        remark=remark,
    )


def other_case(target: str, topology: str, slices: int, settings: Mapping[str, Any], against: str) -> Case:
    """Resolve the settings of a plan with further options, as on a command line.

    Raises:
        UserError: if an option is invalid, or is not an option of a plan.
    """
    try:
        words = shlex.split(against)
    except ValueError as e:
        raise UserError(f"--against {against!r}: {e}") from None
    _, bound = parse(["plan", target, "--topology", topology, "--slices", str(slices), *words])
    given = bound.arguments
    unknown = [name for name in ("against", "meshes", "decode", "estimate", "json") if given.get(name)]
    if unknown or not words:
        raise UserError('--against takes settings, --topology and --slices in quotes, such as "--mesh.tensor 4"')
    return make_case(target, given["topology"], given["slices"], {**settings, **given.get("settings", {})})


def _base(target: str) -> tuple[Config, bool]:
    """Return the config of a preset, shape or run, and whether it is a shape."""
    from jaxgpt.plan.shapes import SHAPES, shape_config

    if target in SHAPES:
        return shape_config(target), True
    is_known = target in PRESETS or Path(target).exists()
    near = did_you_mean(target, SHAPES)
    if near and not is_known:
        raise UserError(f"no preset, shape, run or file {target!r}{near}")
    return named_config(target), False


def _not_compiled(case: Case, estimate: bool) -> str:
    """Return why a step is not compiled, or ""."""
    from jaxgpt.plan.topology import compiler_missing

    if estimate:
        return "--estimate is given; omit it to compile"
    return compiler_missing(case.topology)


def estimates(case: Case) -> dict[str, StepCost]:
    """Estimate the training step and, if the model generates answers, the rollout."""
    from jaxgpt.plan.estimate import estimate
    from jaxgpt.plan.rollout import rollout

    with progress("estimating"):
        costs = {"train": estimate(case.config, case.topology, case.work)}
        if case.work.answers:
            costs["rollout"] = rollout(case.config, case.topology, case.work)
    return costs


def compiled(case: Case, decode: bool) -> dict[str, StepCost]:
    """Compile the training step and, with `decode`, a decoding step."""
    from jaxgpt.plan.plan import compile_decode, compile_step

    with progress("compiling the training step"):
        costs: dict[str, StepCost] = {"train": compile_step(case.config, case.topology, work=case.work)}
    if decode:
        with progress("compiling the sampler"):
            costs["decode"] = compile_decode(case.config, case.topology)
    return costs


def _larger(case: Case) -> str:
    """Describe the smallest slice that fits a run, if no flags fit it on its own slice."""
    from jaxgpt.plan.choices import smallest_slice

    found = smallest_slice(case.config, case.topology, case.work)
    if found is None:
        return f"Nothing fits on {case.topology}, or on a larger slice of {case.topology.chip.title}."
    slice_, flags = found
    return f"Nothing fits on {case.topology}. The smallest slice that fits: --topology {slice_} {flags}"


def _print_meshes(case: Case, json: bool) -> int:
    """Print the meshes of a topology, those that fit first and by time; return the exit code."""
    from jaxgpt.plan.choices import meshes

    chip = case.topology.chip
    with progress("estimating all meshes") as activity:
        found = meshes(case.config, case.topology, case.work, activity)
    fits = any(choice.cost.fits for choice in found)
    code = 0 if fits else 1
    larger = "" if fits else _larger(case)
    if json:
        rows = [{"flags": choice.flags, "mesh": asdict(choice.mesh), **choice.cost.to_json(chip)} for choice in found]
        about = {"name": case.title, "topology": str(case.topology), "fits": fits, "larger": larger}
        print_json({**about, "meshes": rows})
        return code

    head = _head(case)
    del head["mesh"], head["note"]  # facts of one mesh
    print(aligned(head))
    print("\nestimates of all meshes, per device and step; times without overlap")
    header = ("mesh", "GiB", "fits", "step, ms", "compute", "memory", "links", "network", "MFU at most")
    print(columns([header, *(mesh_row(choice, case.topology) for choice in found)]))
    if larger:
        print(f"\n{larger}")
    return code


def _print_comparison(cases: tuple[Case, Case], against: str, why_not: str, decode: bool, json: bool) -> int:
    """Print two plans in columns, with their difference; return the exit code, 1 if one of the plans does not fit."""
    costs = []
    for case in cases:
        of_case = estimates(case)
        if not why_not:
            of_case |= compiled(case, decode)
        costs.append(of_case)
    fits = all(cost.fits for of_case in costs for cost in of_case.values())
    code = 0 if fits else 1
    this, other = cases
    if json:
        plans = [_plan_json(case, of_case) for case, of_case in zip(cases, costs, strict=True)]
        about = {"name": this.title, "against": against, "fits": fits, "not_compiled": why_not}
        print_json({**about, "plans": plans})
        return code

    print(aligned(_head(this)))
    how = "estimates" if why_not else "compiled"
    print(f"\n{how}, per device and step: this plan, with {against}, and the difference")
    rows = [("", "this plan", "against", "difference")]
    costs_this, costs_other = costs
    for name in costs_this:
        if name in costs_other:
            figures = figures_of(costs_this[name], this.topology)
            figures_other = figures_of(costs_other[name], other.topology)
            rows += difference(figures, figures_other, "" if name == "train" else f"{name}: ")
    print(columns(rows))
    if why_not:
        print(f"\nnot compiled: {why_not}")
    return code


def _plan_json(case: Case, costs: Mapping[str, StepCost]) -> dict[str, Any]:
    """Return one of two compared plans as JSON."""
    chip = case.topology.chip
    about = {"topology": str(case.topology), "mesh": asdict(case.config.mesh)}
    return about | {name: cost.to_json(chip) for name, cost in costs.items()}


def _rollout_title(case: Case) -> str:
    answers = case.work.answers
    assert answers is not None
    every = plural(answers.steps, "step")
    generated = f"{answers.rows:,} answers of {answers.tokens:,} tokens"
    return f"\nestimate of a rollout, before every {every}: {generated}, lower bounds"


def _head(case: Case) -> dict[str, str]:
    """Return the lines above the tables of a plan, keyed by label."""
    from jaxgpt.parallel.mesh import sizes_of
    from jaxgpt.parallel.rows import microbatches, row_shards
    from jaxgpt.plan.shapes import SHAPES

    config = case.config
    train = config.train
    sizes = sizes_of(config.mesh)
    ways = row_shards(sizes)
    count, rows = microbatches(train, ways)
    tokens = f"{train.batch_size:,} x {config.window:,} = {train.batch_size * config.window:,} tokens"
    split = f"{rows // ways} rows per device {count} times"

    topology = case.topology
    chip = topology.chip
    memory = f"{chip.hbm / GIB:.2f} GiB at {si(chip.hbm_bandwidth)}B/s"
    links = f"links {si(chip.link)}B/s, network {si(chip.network)}B/s"

    shape = ""
    if case.title in SHAPES:
        shape = f"{SHAPES[case.title].source}; no recipe or data"
    return {
        "run": f"{case.title} on {topology}: {topology.n_devices:,} x {chip.title}",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
        "step": f"{tokens}, {split}, {train.compute_dtype}, remat {train.remat}",
        "device": f"{si(chip.flops)}FLOP/s, {memory}, {links}",
        "attention": case.attention,
        "objective": "" if case.objective == "next-token" else case.objective,
        "shape": shape,
        "note": case.remark,
    }
