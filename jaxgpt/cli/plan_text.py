"""The output of plans: the text and the JSON of a plan, and of all meshes of a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import aligned, columns
from jaxgpt.cli.plan_case import Case
from jaxgpt.cli.plan_parts import Advice, Plan
from jaxgpt.cli.plan_tables import GIB, MESH_TITLES, head, mesh_row, rollout_title, table

if TYPE_CHECKING:
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.meshes import MeshChoice

OF_ONE_MESH = ("mesh", "note")  # labels of `head` that a table of all meshes omits


def estimate_text(case: Case, estimates: Mapping[str, StepCost]) -> str:
    """Format the run and its estimates."""
    parts = [
        aligned(head(case)),
        "\nestimate from shapes and shardings, per device and step (parameters and optimizer are exact)",
        table(estimates["train"], case.topology, case.steps),
    ]
    if "rollout" in estimates:
        parts += [f"\n{rollout_title(case)}", table(estimates["rollout"], case.topology, unit="rollout")]
    return "\n".join(parts)


def program_text(case: Case, programs: Mapping[str, StepCost]) -> str:
    """Format the costs of compiled programs."""
    parts = ["\ncompiled training step, per device", table(programs["train"], case.topology, case.steps)]
    if "decode" in programs:
        parts += [
            "\ncompiled decode step, per device (one token per row)",
            table(programs["decode"], case.topology),
        ]
    return "\n".join(parts)


def advice_text(advice: Advice, hbm: float) -> str:
    """Format the advice for a run that does not fit on a device with `hbm` bytes of memory."""
    lines = ["\nThe run does not fit. Options that need less memory (estimate, GiB per device):"]
    for flags, total in advice.hints:
        verdict = "  (fits)" if total <= hbm else ""
        lines.append(f"  {total / GIB:7.2f}  {flags}{verdict}")
    if advice.larger:
        lines.append(advice.larger)
    return "\n".join(lines)


def plan_json(plan: Plan, why_not: str, advice: Advice) -> dict[str, Any]:
    """Return a plan as values for JSON; `why_not`: why it is not compiled, or ""."""
    case = plan.case
    topology = case.topology
    return {
        "name": case.title,
        "note": case.remark,
        "attention": case.attention,
        "fits": plan.fits,
        "not_compiled": why_not,
        "chip": topology.chip.title,
        "devices": topology.n_devices,
        "suggestions": [{"flags": flags, "total": total} for flags, total in advice.hints],
        "larger": advice.larger,
        # `plan.to_json` has the compiled step as "train"; if the step is not compiled, "train" equals "estimate".
        "estimate": plan.estimates["train"].to_json(topology.chip),
        **plan.to_json(),
    }


def meshes_text(case: Case, choices: Sequence[MeshChoice], larger: str) -> str:
    """Format the meshes of a topology in columns; `larger`: a line about a larger slice, or ""."""
    facts = {label: fact for label, fact in head(case).items() if label not in OF_ONE_MESH}
    rows = [mesh_row(choice, case.topology) for choice in choices]
    parts = [
        aligned(facts),
        "\nestimates of all meshes, per device and step; times without overlap",
        columns([MESH_TITLES, *rows]),
    ]
    if larger:
        parts.append(f"\n{larger}")
    return "\n".join(parts)


def meshes_json(case: Case, choices: Sequence[MeshChoice], larger: str) -> dict[str, Any]:
    """Return the meshes of a topology as values for JSON."""
    rows = []
    for choice in choices:
        about = {"flags": choice.flags, "mesh": asdict(choice.mesh)}
        rows.append(about | choice.cost.to_json(case.topology.chip))
    return {
        "name": case.title,
        "topology": str(case.topology),
        "fits": any(choice.cost.fits for choice in choices),
        "larger": larger,
        "meshes": rows,
    }
