"""The tables of a plan: the run, the cost of a step or a rollout, and the meshes of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxgpt.cli.output import aligned
from jaxgpt.errors import plural
from jaxgpt.progress import duration

if TYPE_CHECKING:
    from jaxgpt.cli.plan_case import Case
    from jaxgpt.config import Config
    from jaxgpt.parallel.chips import Chip
    from jaxgpt.plan.collectives import Collective
    from jaxgpt.plan.cost import Bounds, Resource, StepCost
    from jaxgpt.plan.meshes import MeshChoice
    from jaxgpt.plan.topology import Topology

GIB = 2**30
CLOSE = 0.7  # minimum fraction of memory for the advice to compile: a program needs up to 1.4 times its estimate
SITES = 12  # maximum number of rows for collectives
RESOURCES: tuple[Resource, ...] = ("compute", "memory", "links", "network")  # in the order of their columns
MESH_TITLES = ("mesh", "GiB", "fits", "step, ms", *RESOURCES, "MFU at most")


def head(case: Case) -> dict[str, str]:
    """Return the lines above the tables of a plan, keyed by label; "": the line is omitted."""
    from jaxgpt.parallel.mesh import sizes_of
    from jaxgpt.plan.shapes import SHAPES

    topology = case.topology
    shape = ""
    if case.title in SHAPES:
        shape = f"{SHAPES[case.title].source}; no recipe or data"
    return {
        "run": f"{case.title} on {topology}: {topology.n_devices:,} x {topology.chip.title}",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in sizes_of(case.config.mesh).items()),
        "step": _step(case.config),
        "device": _device(topology.chip),
        "attention": case.attention,
        "objective": "" if case.objective == "next-token" else case.objective,
        "shape": shape,
        "note": case.remark,
    }


def _step(config: Config) -> str:
    """Describe a step: its batch, how the batch is split over devices and microbatches, and its memory settings."""
    from jaxgpt.parallel.mesh import sizes_of
    from jaxgpt.parallel.rows import microbatches, row_shards

    train = config.train
    shards = row_shards(sizes_of(config.mesh))
    count, rows = microbatches(train, shards)
    tokens = f"{train.batch_size:,} x {config.window:,} = {train.batch_size * config.window:,} tokens"
    split = f"{rows // shards} rows per device {count} times"
    return f"{tokens}, {split}, {train.compute_dtype}, remat {train.remat}"


def _device(chip: Chip) -> str:
    """Describe the peak rates of a chip, and its memory."""
    memory = f"{chip.hbm / GIB:.2f} GiB at {si(chip.hbm_bandwidth, 'B/s')}"
    links = f"links {si(chip.link, 'B/s')}, network {si(chip.network, 'B/s')}"
    return f"{si(chip.flops, 'FLOP/s')}, {memory}, {links}"


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
    facts["memory traffic"] = si(cost.hbm_bytes, "B")
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
    if "seconds_least" in bounds:
        least = _ms(bounds["seconds_least"])
        lines.append(f"lower bound of the {unit}: {least}; upper bound of MFU: {largest_mfu(bounds):.0%}")
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
        sent = f"{plural(collective.times, 'call')}, {si(collective.sent * collective.times, 'B')} sent"
        rows.append(f"{time}  {collective.kind} {where}: {collective.site or 'scalars and others'}, {sent}")

    others = collectives[SITES:]
    if others:
        total_seconds = sum(collective_seconds(collective, topology.chip).all_links for collective in others)
        total_sent = sum(collective.sent * collective.times for collective in others)
        rows.append(f"{_ms(total_seconds)}  {len(others)} smaller kinds, {si(total_sent, 'B')} sent")
    return rows


def mesh_row(choice: MeshChoice, topology: Topology) -> Sequence[str]:
    """Return the row of a mesh under `MESH_TITLES`: milliseconds of a step and of each resource, and the largest MFU."""
    cost = choice.cost
    seconds = cost.seconds(topology.chip)
    bounds = cost.bounds(topology.chip)
    times = [bounds["seconds_serial"], *(seconds[resource] for resource in RESOURCES)]
    milliseconds = [f"{1e3 * each:.2f}" for each in times]
    fits = "yes" if cost.fits else "no"
    return choice.flags, f"{cost.total / GIB:.2f}", fits, *milliseconds, f"{largest_mfu(bounds):.0%}"


def largest_mfu(bounds: Bounds) -> float:
    """Return the upper bound on the MFU of a step; if it is unknown, return the MFU with full overlap."""
    return bounds.get("mfu_most", bounds["mfu_overlapped"])


def along(collective: Collective) -> str:
    """Return the names of the mesh axes along which a collective communicates, or the size of its groups."""
    return " x ".join(collective.axes) or f"groups of {collective.group}"


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.2f} ms"


def si(value: float, unit: str = "") -> str:
    """Format a number with an SI prefix and a unit: 1.5e9 as `1.5 G`, or as `1.5 GB` with the unit B."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # Without the factor 0.9995, 999.9 M would be formatted as 1e+03 M.
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
