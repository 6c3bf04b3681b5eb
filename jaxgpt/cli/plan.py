"""jaxgpt plan TARGET --topology v5e:2x4 [--slices N] [--against OPTIONS] [--meshes] [--decode] [--estimate] [--json]"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from jaxgpt.cli.options import NO_SETTINGS, GivenSettings, Json
from jaxgpt.cli.output import aligned, columns, print_json, progress
from jaxgpt.cli.plan_case import Case, make_case, other_case
from jaxgpt.cli.plan_tables import GIB, difference, figures_of, head, mesh_row, rollout_title, table
from jaxgpt.errors import FAILED, UserError

if TYPE_CHECKING:
    from jaxgpt.plan.cost import StepCost

OF_ONE_MESH = ("mesh", "note")  # labels of `head` that a table of all meshes omits


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

    Published architectures, without recipe or data, are llama-3.2-1b, llama-2-7b,
    llama-3-8b, llama-3-70b and mixtral-8x7b.

    jaxgpt plan gpt2 --topology v5e-8
    jaxgpt plan gpt2-xl --topology v5p:4x4x4 --mesh.fsdp -1
    jaxgpt plan runs/shakespeare --topology h100:8 --slices 4 --estimate
    jaxgpt plan llama-3-8b --topology v5p-128 --meshes
    jaxgpt plan llama-3-8b --topology v5p-128 --mesh.fsdp -1 --against "--mesh.tensor 4"

    Args:
        target: preset, published architecture or run
        topology: chip and grid, such as v5e:2x4, or a Google Cloud slice, such as v5e-8
        slices: number of TPU slices or GPU machines, connected by a network
        against: also plan with these further options, such as "--mesh.tensor 4", and print both plans in columns
        meshes: estimate all meshes of the topology instead of one mesh; sorted by time, the meshes that fit first
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


class Advice(NamedTuple):
    """Ways to make a run fit.

    Attributes:
        hints: options that need less memory, and the estimated bytes per device with each.
        larger: a line about the smallest slice that fits; "" if a hint fits.
    """

    hints: Sequence[tuple[str, float]] = ()
    larger: str = ""

    def text(self, hbm: float) -> str:
        """Format the advice for a device with `hbm` bytes of memory."""
        lines = []
        for flags, total in self.hints:
            verdict = "  (fits)" if total <= hbm else ""
            lines.append(f"  {total / GIB:7.2f}  {flags}{verdict}")
        if self.larger:
            lines.append(self.larger)
        return "\n".join(lines)


def _advice(case: Case) -> Advice:
    """Find options to reduce the memory of a run, and a larger slice if no option suffices."""
    from jaxgpt.plan.choices import suggestions

    hints = suggestions(case.config, case.topology, case.work)
    is_enough = any(total <= case.topology.chip.hbm for _, total in hints)
    return Advice(hints, "" if is_enough else _larger(case))


def _larger(case: Case) -> str:
    """Describe the smallest slice with enough memory for a run; no option makes it fit on its own slice."""
    from jaxgpt.plan.choices import smallest_slice

    found = smallest_slice(case.config, case.topology, case.work)
    if found is None:
        return f"Nothing fits on {case.topology}, or on a larger slice of {case.topology.chip.title}."
    slice_, flags = found
    return f"Nothing fits on {case.topology}. The smallest slice that fits: --topology {slice_} {flags}"


def _fit(costs: Mapping[str, StepCost]) -> bool:
    """Return whether every part of a plan fits in memory."""
    return all(cost.fits for cost in costs.values())


def _print_plan(case: Case, why_not: str, decode: bool, json: bool) -> int:
    """Print the estimates of a plan, its compiled steps and advice; return the exit code.

    As text, every part is printed as soon as it is known, because compilation takes minutes.
    """

    def show(text: str) -> None:
        if not json:
            print(text)

    topology = case.topology
    show(aligned(head(case)))
    estimated = estimates(case)
    show("\nestimate from shapes and shardings, per device and step (parameters and optimizer are exact)")
    show(table(estimated["train"], topology, case.steps))
    if "rollout" in estimated:
        show(f"\n{rollout_title(case)}")
        show(table(estimated["rollout"], topology, unit="rollout"))

    costs = estimated
    if why_not:
        show(f"\nnot compiled: {why_not}")
    else:
        costs = estimated | compiled(case, decode)
        show("\ncompiled training step, per device")
        show(table(costs["train"], topology, case.steps))
    if "decode" in costs:
        show("\ncompiled decode step, per device (one token per row)")
        show(table(costs["decode"], topology))

    fits = _fit(costs)
    advice = Advice()
    if not fits:
        show("\nThe run does not fit. Options that need less memory (estimate, GiB per device):")
        advice = _advice(case)
        show(advice.text(topology.chip.hbm))

    if json:
        about = {
            "name": case.title,
            "note": case.remark,
            "attention": case.attention,
            "fits": fits,
            "not_compiled": why_not,
            "chip": topology.chip.title,
            "devices": topology.n_devices,
            "suggestions": [{"flags": flags, "total": total} for flags, total in advice.hints],
            "larger": advice.larger,
        }
        # "train" repeats the estimate of a step that is not compiled.
        print_json(about | _costs_json(case, {"estimate": estimated["train"], **costs}))
    return 0 if fits else FAILED


def _print_meshes(case: Case, json: bool) -> int:
    """Print the meshes of a topology, sorted by time, the meshes that fit first; return the exit code."""
    from jaxgpt.plan.choices import meshes

    topology = case.topology
    with progress("estimating all meshes") as activity:
        choices = meshes(case.config, topology, case.work, activity)
    fits = any(choice.cost.fits for choice in choices)
    larger = "" if fits else _larger(case)

    if json:
        rows = [
            {"flags": choice.flags, "mesh": asdict(choice.mesh), **choice.cost.to_json(topology.chip)}
            for choice in choices
        ]
        about = {"name": case.title, "topology": str(topology), "fits": fits, "larger": larger}
        print_json({**about, "meshes": rows})
    else:
        print(aligned({label: fact for label, fact in head(case).items() if label not in OF_ONE_MESH}))
        print("\nestimates of all meshes, per device and step; times without overlap")
        titles = ("mesh", "GiB", "fits", "step, ms", "compute", "memory", "links", "network", "MFU at most")
        print(columns([titles, *(mesh_row(choice, topology) for choice in choices)]))
        if larger:
            print(f"\n{larger}")
    return 0 if fits else FAILED


def _print_comparison(cases: tuple[Case, Case], against: str, why_not: str, decode: bool, json: bool) -> int:
    """Print two plans in columns, with their difference; return the exit code."""
    plans = []
    for case in cases:
        costs = estimates(case)
        if not why_not:
            costs |= compiled(case, decode)
        plans.append(costs)
    fits = all(map(_fit, plans))

    this, other = cases
    if json:
        about = {"name": this.title, "against": against, "fits": fits, "not_compiled": why_not}
        print_json({**about, "plans": [_costs_json(case, costs) for case, costs in zip(cases, plans, strict=True)]})
    else:
        print(aligned(head(this)))
        kind = "estimates" if why_not else "compiled"
        print(f"\n{kind}, per device and step: this plan, with {against}, and the difference")
        print(columns(_comparison_rows(this, other, *plans)))
        if why_not:
            print(f"\nnot compiled: {why_not}")
    return 0 if fits else FAILED


def _comparison_rows(
    this: Case, other: Case, costs: Mapping[str, StepCost], other_costs: Mapping[str, StepCost]
) -> list[tuple[str, str, str, str]]:
    """Return the table of the parts that both plans have."""
    rows = [("", "this plan", "against", "difference")]
    for part in costs:
        if part in other_costs:
            figures = figures_of(costs[part], this.topology)
            other_figures = figures_of(other_costs[part], other.topology)
            rows += difference(figures, other_figures, "" if part == "train" else f"{part}: ")
    return rows


def _costs_json(case: Case, costs: Mapping[str, StepCost]) -> dict[str, Any]:
    """Return the topology, the mesh and the costs of a plan as values for JSON."""
    about = {"topology": str(case.topology), "mesh": asdict(case.config.mesh)}
    return about | {part: cost.to_json(case.topology.chip) for part, cost in costs.items()}
