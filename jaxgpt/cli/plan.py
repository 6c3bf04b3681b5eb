"""jaxgpt plan PRESET|RUN --topology v5e:2x4 [--slices N] [--decode] [--estimate] [--json]"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from jaxgpt.cli.options import NO_SETTINGS, GivenSettings, Json
from jaxgpt.cli.output import aligned, print_json, progress
from jaxgpt.cli.settings import check_next_token, named_config, with_settings, with_vocab
from jaxgpt.config import Config
from jaxgpt.errors import UserError, plural
from jaxgpt.progress import duration

if TYPE_CHECKING:
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.topology import Topology

GIB = 2**30
CLOSE = 0.45  # minimum fraction of memory for the advice to compile; a program needs up to twice its estimate


def plan(
    target: str,
    /,
    *,
    topology: str,
    slices: int = 1,
    decode: bool = False,
    estimate: bool = False,
    json: Json = False,
    settings: GivenSettings = NO_SETTINGS,
) -> int:
    """Plan a run for hardware you do not have: memory per device, communication, a bound on speed.

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

    jaxgpt plan gpt2 --topology v5e-8
    jaxgpt plan gpt2-xl --topology v5p:4x4x4 --mesh.fsdp -1
    jaxgpt plan runs/shakespeare --topology h100:8 --slices 4 --estimate

    Args:
        target: preset or run
        topology: chip and grid, such as v5e:2x4, or a Google Cloud slice, such as v5e-8
        slices: number of TPU slices or GPU machines, connected by a network
        decode: also plan a decoding step: one token for each row of a microbatch, with a full context
        estimate: print only the estimate, do not compile
    """
    config = with_settings(named_config(target), settings)
    check_next_token(config, "plan")
    config = with_vocab(config)
    if config.train.epochs:
        raise UserError(
            f"train.epochs {config.train.epochs:g} needs the number of tokens, which plan does not count: "
            "use --train.steps N --train.epochs 0"
        )
    # A plan needs no devices of this machine. Without this variable, an installed libtpu would search for TPUs.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxgpt.plan import estimate as estimates
    from jaxgpt.plan.plan import compile_decode, compile_step
    from jaxgpt.plan.topology import compiler_missing, parse_topology

    chips = parse_topology(topology, slices)
    config, remark = estimates.resolve_mesh(config, chips)
    why_not = "--estimate is given; omit it to compile" if estimate else compiler_missing(chips)
    if decode and why_not:
        raise UserError(f"--decode needs the compiler: {why_not}")

    def show(text: str) -> None:
        if not json:
            print(text)

    show(aligned(_head(target, config, chips, remark)))
    with progress("estimating"):
        steps = {"train": estimates.estimate(config, chips)}
    show("\nestimate from shapes and shardings, per device and step (parameters and optimizer are exact)")
    show(table(steps["train"], chips, config.train.steps))
    if why_not:
        show(f"\nnot compiled: {why_not}")
    else:
        with progress("compiling the training step"):
            steps["train"] = compile_step(config, chips)
        show("\ncompiled training step, per device")
        show(table(steps["train"], chips, config.train.steps))
    if decode:
        with progress("compiling the sampler"):
            steps["decode"] = compile_decode(config, chips)
        show("\ncompiled decode step, per device (one token per row)")
        show(table(steps["decode"], chips))

    hints: list[tuple[str, float]] = []
    fits = all(cost.fits for cost in steps.values())
    if not fits:
        show("\nThe run does not fit. Options that need less memory (estimate, GiB per device):")
        hints = estimates.suggestions(config, chips)
    for flags, total in hints:
        verdict = "  (fits)" if total <= chips.chip.hbm else ""
        show(f"  {total / GIB:7.2f}  {flags}{verdict}")

    if json:
        about = {
            "name": target,
            "note": remark,
            "fits": fits,
            "not_compiled": why_not,
            "topology": str(chips),
            "chip": chips.chip.title,
            "devices": chips.n_devices,
            "mesh": asdict(config.mesh),
            "suggestions": [{"flags": flags, "total": total} for flags, total in hints],
        }
        costs = {name: cost.to_json(chips.chip) for name, cost in steps.items()}
        print_json(about | costs)
    return 0 if fits else 1


def table(cost: StepCost, topology: Topology, steps: int = 0) -> str:
    """Format the per-device cost of a step, and the time of `steps` steps; 0: omit the time."""
    facts: dict[str, str | list[str]] = {kind: f"{size / GIB:9.3f} GiB" for kind, size in cost.memory.items()}
    is_close = cost.total > CLOSE * cost.available
    if not cost.fits:
        verdict = "DOES NOT FIT"
    elif is_close and not cost.compiled:
        verdict = "may not fit: a program needs up to twice its estimate; compile it to check"
    else:
        verdict = "fits"
    facts["total"] = f"{cost.total / GIB:9.3f} GiB of {cost.available / GIB:.2f} GiB: {verdict}"
    if cost.out_of_memory:
        return aligned(facts)

    flops = f"{_si(cost.model_flops)} for the model"
    if cost.compiled_flops:
        flops += f"; the compiler counts {_si(cost.compiled_flops)}"
        if cost.loops_once:
            flops += " (loop bodies counted once)"
    facts["FLOPs"] = flops
    facts["memory traffic"] = f"{_si(cost.hbm_bytes)}B"
    for kind, traffic in cost.traffic.items():
        sent = f"{_si(traffic.sent)}B sent"
        if traffic.sent_between_slices:
            sent += f", {_si(traffic.sent_between_slices)}B to other slices"
        facts[kind] = f"{plural(traffic.count, 'call')}, {_si(traffic.bytes)}B total, {sent}"

    seconds = cost.seconds(topology.chip)
    facts["lower bounds"] = ", ".join(f"{kind} {1e3 * each:.2f} ms" for kind, each in seconds.items() if each)
    bounds = cost.bounds(topology.chip)
    low = bounds["seconds_overlapped"]
    high = bounds["seconds_serial"]
    facts["roofline"] = [
        f"step: {1e3 * low:.2f} ms with full overlap (max), {1e3 * high:.2f} ms without overlap (sum)",
        f"MFU: {bounds['mfu_overlapped']:.0%} to {bounds['mfu_serial']:.0%}",
        f"{plural(steps, 'step')}: {duration(steps * low)} to {duration(steps * high)}" if steps else "",
    ]
    return aligned(facts)


def _head(target: str, config: Config, topology: Topology, remark: str) -> dict[str, str]:
    from jaxgpt.parallel.mesh import sizes_of
    from jaxgpt.parallel.rows import microbatches, row_shards

    chip = topology.chip
    train = config.train
    sizes = sizes_of(config.mesh)
    ways = row_shards(sizes)
    count, rows = microbatches(train, ways)
    tokens = f"{train.batch_size:,} x {config.window:,} = {train.batch_size * config.window:,} tokens"
    split = f"{rows // ways} rows per device {count} times"
    memory = f"{chip.hbm / GIB:.2f} GiB at {_si(chip.hbm_bandwidth)}B/s"
    links = f"links {_si(chip.link)}B/s, network {_si(chip.network)}B/s"
    return {
        "run": f"{target} on {topology}: {topology.n_devices:,} x {chip.title}",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
        "step": f"{tokens}, {split}, {train.compute_dtype}, remat {train.remat}",
        "device": f"{_si(chip.flops)}FLOP/s, {memory}, {links}",
        "note": remark,
    }


def _si(value: float) -> str:
    """Format a number with an SI prefix: 1.5e9 as `1.5 G`."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # Without the factor 0.9995, 999.9 M would be formatted as 1e+03 M.
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
