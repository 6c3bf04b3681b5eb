"""The tables of a plan: the run, the cost of a step or a rollout, and the meshes of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxgpt.cli.output import aligned
from jaxgpt.errors import plural
from jaxgpt.progress import duration

if TYPE_CHECKING:
    from jaxgpt.cli.plan_case import Case
    from jaxgpt.parallel.chips import Chip
    from jaxgpt.plan.collectives import Collective
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.meshes import MeshChoice
    from jaxgpt.plan.topology import Topology

GIB = 2**30
CLOSE = 0.7  # minimum fraction of memory for the advice to compile: a program needs up to 1.4 times its estimate
SITES = 12  # maximum number of rows for collectives
MESH_TITLES = ("mesh", "GiB", "fits", "step, ms", "compute", "memory", "links", "network", "MFU at most")


def head(case: Case) -> dict[str, str]:
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


def rollout_title(case: Case) -> str:
    """Return the line above the table of a rollout."""
    answers = case.work.answers
    assert answers is not None
    every = plural(answers.steps, "step")
    generated = f"{answers.rows:,} answers of {answers.tokens:,} tokens"
    return f"estimate of a rollout, before every {every}: {generated}, lower bounds"


def table(cost: StepCost, topology: Topology, steps: int = 0, unit: str = "step") -> str:
    """Format the cost of a unit of work on one device: memory, FLOPs, communication and roofline.

    Args:
        cost: cost of the unit.
        topology: hardware.
        steps: steps of the run; 0: omit its duration.
        unit: name of the unit: step or rollout.
    """
    facts: dict[str, str | list[str]] = {kind: f"{size / GIB:9.3f} GiB" for kind, size in cost.memory.items()}
    facts["total"] = f"{cost.total / GIB:9.3f} GiB of {cost.available / GIB:.2f} GiB: {_verdict(cost)}"
    if cost.out_of_memory:  # the other costs are unknown
        return aligned(facts)

    facts["FLOPs"] = _flops(cost)
    facts["memory traffic"] = f"{si(cost.hbm_bytes)}B"
    facts["communication"] = _collective_rows(cost.collectives, topology)
    facts["at peak rates"] = _times(cost, topology.chip)
    facts["roofline"] = _roofline(cost, topology.chip, steps, unit)
    return aligned(facts)


def _verdict(cost: StepCost) -> str:
    """Describe whether a step fits in memory."""
    if not cost.fits:
        return "DOES NOT FIT"
    is_close = cost.total > CLOSE * cost.available
    if is_close and not cost.compiled:
        return "may not fit: a program needs up to 1.4 times its estimate; compile it to check"
    return "fits"


def _flops(cost: StepCost) -> str:
    """Format the FLOPs of a step: of the model, with recomputation, and as the compiler counts them."""
    flops = f"{si(cost.model_flops)} for the model"
    if cost.computed_flops:
        flops += f", {si(cost.computed_flops)} computed"
    if cost.recomputed_flops:
        flops += f" ({si(cost.recomputed_flops)} by rematerialization)"
    if cost.compiled_flops:
        flops += f"; the compiler counts {si(cost.compiled_flops)}"
        if cost.loops_once:
            flops += " (loop bodies counted once)"
    return flops


def _times(cost: StepCost, chip: Chip) -> str:
    """Format the times of the resources at peak rates."""
    seconds = cost.seconds(chip)
    times = {kind: _ms(each) for kind, each in seconds.items() if each}
    if chip.torus > 1 and "links" in times:
        times["links"] += f" ({1e3 * chip.torus * seconds['links']:.2f} along one dimension)"
    return ", ".join(f"{kind} {time}" for kind, time in times.items())


def _roofline(cost: StepCost, chip: Chip, steps: int, unit: str) -> list[str]:
    """Return lines about the time and the MFU of a unit of work, with full overlap of the resources and without."""
    bounds = cost.bounds(chip)
    low = bounds["seconds_overlapped"]
    high = bounds["seconds_serial"]
    lines = [f"{unit}: {_ms(low)} with full overlap (max), {_ms(high)} without overlap (sum)"]
    least = bounds.get("seconds_least")
    if least:
        lines.append(f"lower bound of the {unit}: {_ms(least)}; upper bound of MFU: {bounds['mfu_most']:.0%}")
    # Model FLOPs count attention to future tokens, which kernels skip.
    above = " (above 100%: model FLOPs count masked scores)" if bounds["mfu_overlapped"] > 1 else ""
    lines.append(f"MFU: {bounds['mfu_overlapped']:.0%} to {bounds['mfu_serial']:.0%}{above}")
    if steps:
        lines.append(f"{plural(steps, 'step')}: {duration(steps * low)} to {duration(steps * high)}")
    return lines


def _collective_rows(collectives: Sequence[Collective], topology: Topology) -> list[str]:
    """Format the collectives of a step in their order; the collectives after the first `SITES` are summed in one row."""
    from jaxgpt.plan.cost import collective_seconds

    rows = []
    for collective in collectives[:SITES]:
        seconds = collective_seconds(collective, topology.chip)
        time = _ms(seconds.all_links)
        if seconds.one_dimension > seconds.all_links:
            time += f" ({1e3 * seconds.one_dimension:.2f} along one dimension)"
        where = "between slices" if collective.between_slices else f"along {along(collective)}"
        sent = f"{plural(collective.times, 'call')}, {si(collective.sent * collective.times)}B sent"
        rows.append(f"{time}  {collective.kind} {where}: {collective.site or 'scalars and others'}, {sent}")

    others = collectives[SITES:]
    if others:
        total = sum(collective_seconds(collective, topology.chip).all_links for collective in others)
        sent = si(sum(collective.sent * collective.times for collective in others))
        rows.append(f"{_ms(total)}  {len(others)} smaller kinds, {sent}B sent")
    return rows


def mesh_row(choice: MeshChoice, topology: Topology) -> Sequence[str]:
    """Return the row of a mesh under `MESH_TITLES`: milliseconds of a step and of each resource, and the largest MFU."""
    cost = choice.cost
    seconds = cost.seconds(topology.chip)
    bounds = cost.bounds(topology.chip)
    times = [bounds["seconds_serial"], *seconds.values()]
    milliseconds = [f"{1e3 * each:.2f}" for each in times]
    fits = "yes" if cost.fits else "no"
    return choice.flags, f"{cost.total / GIB:.2f}", fits, *milliseconds, f"{bounds['mfu_most']:.0%}"


def along(collective: Collective) -> str:
    """Return the names of the mesh axes along which a collective communicates, or the size of its groups."""
    return " x ".join(collective.axes) or f"groups of {collective.group}"


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.2f} ms"


def si(value: float) -> str:
    """Format a number with an SI prefix: 1.5e9 as `1.5 G`."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # Without the factor 0.9995, 999.9 M would be formatted as 1e+03 M.
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
