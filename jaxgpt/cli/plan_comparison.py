"""The output of `jaxgpt plan --against`: two plans in columns with their difference, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import aligned, columns
from jaxgpt.cli.plan_parts import Plan
from jaxgpt.cli.plan_tables import GIB, along, head, largest_mfu

if TYPE_CHECKING:
    from jaxgpt.plan.collectives import Collective
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.topology import Topology


def comparison_text(this: Plan, other: Plan, against: str, not_compiled: str) -> str:
    """Format two plans in columns, with their difference.

    Args:
        this: plan of the command's options.
        other: plan with further options.
        against: the further options.
        not_compiled: why both plans are estimates; "": both are compiled.
    """
    kind = "estimates" if not_compiled else "compiled"
    parts = [
        aligned(head(this.case)),
        f"\n{kind}, per device and step: this plan, with {against}, and the difference",
        columns([("", "this plan", "against", "difference"), *_differences(this, other, "train", "step")]),
    ]

    if "decode" in this.costs:  # in both plans, with --decode
        parts += [
            "\ncompiled decode step, per device (one token per row)",
            columns(_differences(this, other, "decode", "step")),
        ]
    if "rollout" in this.costs and "rollout" in other.costs:
        parts += [
            "\nestimates of a rollout, per device, lower bounds",
            columns(_differences(this, other, "rollout", "rollout")),
        ]

    if not_compiled:
        parts.append(f"\nnot compiled: {not_compiled}")
    return "\n".join(parts)


def comparison_json(this: Plan, other: Plan, against: str, not_compiled: str) -> dict[str, Any]:
    """Return two plans as values for JSON; arguments as for `comparison_text`."""
    return {
        "name": this.case.title,
        "against": against,
        "fits": this.fits and other.fits,
        "not_compiled": not_compiled,
        "plans": [this.to_json(), other.to_json()],
    }


def _differences(this: Plan, other: Plan, part: str, unit: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of a part of two plans; `unit`: its unit of work, step or rollout."""
    figures = _figures(this.costs[part], this.case.topology, unit)
    other_figures = _figures(other.costs[part], other.case.topology, unit)
    rows = []
    for label in {**figures, **other_figures}:
        a = figures.get(label, _absent(this.costs[part]))
        b = other_figures.get(label, _absent(other.costs[part]))
        rows.append(_row(label, a, b))
    return rows


def _absent(cost: StepCost) -> float | None:
    """Return the number of a plan in a row that only the other plan has, such as a collective: 0; None: unknown.

    If the compiler runs out of device memory, the times of a plan are unknown.
    """
    return None if cost.out_of_memory else 0.0


def _figures(cost: StepCost, topology: Topology, unit: str) -> dict[str, float]:
    """Return the numbers of a plan in a comparison, keyed by label: GiB, milliseconds of a unit of work, percent."""
    chip = topology.chip
    figures = {f"{kind}, GiB": size / GIB for kind, size in cost.memory.items()}
    figures |= {"total, GiB": cost.total / GIB, "available, GiB": cost.available / GIB}
    if cost.out_of_memory:
        return figures
    figures |= {f"{name}, ms": 1e3 * each for name, each in cost.seconds(chip).items()}
    for (kind, axes), seconds in _seconds_by_axes(cost.collectives, topology).items():
        figures[f"  {kind} along {axes}, ms"] = 1e3 * seconds
    bounds = cost.bounds(chip)
    figures |= {
        f"{unit} with full overlap, ms": 1e3 * bounds["seconds_overlapped"],
        f"{unit} without overlap, ms": 1e3 * bounds["seconds_serial"],
        "MFU at most, %": 100 * largest_mfu(bounds),
    }
    return figures


def _seconds_by_axes(collectives: Sequence[Collective], topology: Topology) -> dict[tuple[str, str], float]:
    """Sum the seconds of collectives, with all links in use, by kind and mesh axes."""
    from jaxgpt.plan.cost import collective_seconds

    sums: dict[tuple[str, str], float] = {}
    for collective in collectives:
        key = collective.kind, along(collective)
        seconds = collective_seconds(collective, topology.chip).all_links
        sums[key] = sums.get(key, 0.0) + seconds
    return sums


def _row(label: str, a: float | None, b: float | None) -> tuple[str, str, str, str]:
    """Return a row of a comparison: label, number of each plan, change; an unknown number is empty."""
    change = ""
    if a is not None and b is not None:
        change = f"{b - a:+.2f}"
        if a and abs(b - a) > 0.005:
            change += f" ({(b - a) / a:+.0%})"
    numbers = ["" if each is None else f"{each:.2f}" for each in (a, b)]
    return label, numbers[0], numbers[1], change
