"""jaxgpt plan PRESET|RUN --topology v5e:2x4 [--slices N] [--decode] [--full] [--estimate] [--json] [--section.field ...]"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from jaxgpt.cli.output import print_json
from jaxgpt.cli.parse import Json, Settings
from jaxgpt.cli.progress import progress
from jaxgpt.cli.settings import named_config, with_settings, with_vocab
from jaxgpt.config import Config, MeshConfig
from jaxgpt.errors import UserError, plural

if TYPE_CHECKING:
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.topology import Topology


HOPELESS = 2  # do not compile if the estimate exceeds the available memory by this factor
CLOSE = 0.45  # suggest compiling above this fraction of memory: programs need up to twice the estimate
PROGRAMS = {"train": "training step", "decode": "sampler"}
UNITS = {"train": "step", "decode": "token of each row"}
LEGEND = """
total: bytes of all results of a collective. sent: bytes that a device sends for them (a ring; a reduce-scatter sends more than
its result). collective-permute: part of a collective that the compiler split into steps between neighbors. Lower bounds divide
FLOPs, memory traffic and bytes sent by the rates of the chip; a step takes at least their maximum."""


def plan(
    target: str,
    /,
    *,
    topology: str,
    slices: int = 1,
    decode: bool = False,
    full: bool = False,
    estimate: bool = False,
    json: Json = False,
    settings: Settings,
) -> int:
    """Plan a run on hardware you do not have, without executing it: memory per device, communication, and a bound on speed.

    The first table is an estimate. If the compiler is installed (TPUs: pip install -e '.[tpu]'; H100, H200: '.[cuda13]'; Linux,
    x86-64, no accelerator needed), the training step is also compiled for the topology, and a second table shows the
    compiler's numbers. The exit code is 1 if the run does not fit.

    The roofline divides FLOPs, memory traffic and communication by the peak rates of the device. FLOPs are computed from
    the model; memory traffic is the compiler's count of operands and results, including those that stay on the chip;
    communication is read from the compiled program.

    A topology is a chip and a grid: v4:2x2x2, v5e:2x4, v5p:4x4x4, v6e:4x8, tpu7x:2x2x1; or the name of a Google Cloud slice:
    v5e-8, v5litepod-16, v6e-8 (chips), v5p-128, v4-32 (TensorCores, two per chip). GPUs are a100, b200, h100, h200, l4,
    l40s and mi300x, at most 8 per machine: h100:8 --slices 4 is four machines. Any other device is custom, with its
    numbers: custom:8,peak=312T,hbm=80G,bandwidth=2039G,link=300G,network=25G (FLOP/s, bytes, bytes/s).

    jaxgpt plan gpt2 --topology v5e-8
    jaxgpt plan gpt2-xl --topology v5p:4x4x4 --mesh.fsdp -1
    jaxgpt plan runs/shakespeare --topology h100:8 --slices 4 --estimate

    Args:
        target: preset or run
        topology: chip and grid, such as v5e:2x4, or a Google Cloud slice, such as v5e-8
        slices: number of TPU slices or GPU machines, connected by a network
        decode: also plan a decoding step: one token for each row of a microbatch, with a full context
        full: compile with full optimization: five times slower; memory changes by a few percent
        estimate: print only the estimate, do not compile
    """
    config = with_vocab(with_settings(named_config(target), settings))
    if config.train.epochs:
        raise UserError(
            f"train.epochs {config.train.epochs:g} needs the data, which plan does not read: set --train.steps"
        )
    # The devices of this machine are not used, and libtpu, if installed, would look for TPUs.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxgpt.plan.estimate import resolve_mesh
    from jaxgpt.plan.topology import parse_topology

    chips = parse_topology(topology, slices)
    config, remark = resolve_mesh(config, chips)
    return _plan(target, config, chips, remark, Options(decode, full, estimate, json))


class Options(NamedTuple):
    """Options of the command."""

    decode: bool
    full: bool
    estimate: bool
    json: bool


def _plan(target: str, config: Config, topology: Topology, remark: str, args: Options) -> int:
    from jaxgpt.plan.estimate import estimate, suggestions
    from jaxgpt.plan.plan import compile_decode, compile_step
    from jaxgpt.plan.topology import compiler_missing

    say: Callable[[str], None] = (lambda text: None) if args.json else print
    why_not = "--estimate is given" if args.estimate else compiler_missing(topology)
    if args.decode and why_not:
        raise UserError(f"--decode needs the compiler: {why_not}")
    say(_head(target, config, topology, remark))
    with progress("estimating"):
        steps = {"train": estimate(config, topology)}
    say("\nestimate from shapes and shardings (parameters and optimizer are exact)")
    say(table(steps["train"], topology, config.train.steps))
    if not why_not and steps["train"].total > HOPELESS * topology.chip.hbm:
        why_not = f"the estimate exceeds {HOPELESS} times the available memory"
    programs = {"train": compile_step} | ({"decode": compile_decode} if args.decode else {})
    for name, compiler in ({} if why_not else programs).items():
        say("")
        start = time.monotonic()
        with progress(f"compiling the {PROGRAMS[name]}"):
            steps[name] = compiler(config, topology, not args.full)
        took = f"{time.monotonic() - start:.0f} s; per device and {UNITS[name]}, from the"
        failed = steps[name].out_of_memory
        origin = f"out of memory after {took} compiler's message" if failed else f"compiled in {took} compiled program"
        say(origin + "\n" + table(steps[name], topology, config.train.steps if name == "train" else 0))
    say(LEGEND)
    if why_not:
        say(f"\nnot compiled: {why_not}")
    fits, chip = all(cost.fits for cost in steps.values()), topology.chip
    advice = [] if fits else suggestions(config, topology)
    if not fits:
        say("\nThe run does not fit. Options that need less memory (estimate, GiB per device):")
        say(
            "\n".join(f"  {total / 2**30:7.2f}  {flags}{'  (fits)' * (total <= chip.hbm)}" for flags, total in advice)
            or "  none: use more chips or a smaller model"
        )
    if args.json:
        mesh = {f.name: getattr(config.mesh, f.name) for f in fields(MeshConfig)}
        machine = {"topology": str(topology), "chip": topology.chip.title, "devices": topology.n_devices, "mesh": mesh}
        costs = {name: step.to_json(topology.chip) for name, step in steps.items()}
        hints = [{"flags": flags, "total": total} for flags, total in advice]
        head = {"name": target, "note": remark, "fits": fits, "not_compiled": why_not}
        print_json(head | machine | costs | {"suggestions": hints})
    return 0 if fits else 1


def table(cost: StepCost, topology: Topology, steps: int = 0) -> str:
    """Format the cost of a step on one device, and the time of a run of this number of steps; 0: omit it."""
    chip = topology.chip
    rows = [f"  {kind:<18}{_gib(size)}" for kind, size in cost.memory.items()]
    verdict = "fits" if cost.fits else "DOES NOT FIT"
    if not cost.compiled and CLOSE * cost.available < cost.total <= cost.available:
        verdict = "close to the limit: compile to be sure" if chip.host else "close to the limit (estimate)"
    rows.append(f"  {'total':<18}{_gib(cost.total)} of {cost.available / 2**30:.2f} GiB: {verdict}")
    if cost.out_of_memory:
        return "\n".join(rows)
    count = f"; the compiler counts {_si(cost.compiled_flops)}" if cost.compiled_flops else ""
    once = " (loop bodies counted once)" if cost.compiled_flops and cost.loops_once else ""
    rows.append(f"FLOPs               {_si(cost.model_flops)} for the model{count}{once}")
    rows.append(f"memory traffic      {_si(cost.hbm_bytes)}B")
    for kind, traffic in cost.traffic.items():
        between = f", {_si(traffic.sent_between_slices)}B to other slices" if traffic.sent_between_slices else ""
        rows.append(
            f"{kind:<20}{traffic.count:,} calls, {_si(traffic.bytes)}B total, {_si(traffic.sent)}B sent{between}"
        )
    seconds, bounds = cost.seconds(chip), cost.bounds(chip)
    rows.append("lower bounds        " + ", ".join(f"{k} {v * 1e3:.2f} ms" for k, v in seconds.items() if v))
    rows.append(
        f"step by roofline    {bounds['seconds_overlapped'] * 1e3:.2f} ms if all overlap (max), "
        f"{bounds['seconds_serial'] * 1e3:.2f} ms if none do (sum)"
    )
    rows.append(f"MFU by roofline     {bounds['mfu_overlapped']:.0%} to {bounds['mfu_serial']:.0%}")
    if steps:
        times = _duration(steps * bounds["seconds_overlapped"], steps * bounds["seconds_serial"])
        rows.append(f"run by roofline     {plural(steps, 'step')}: {times}, without evaluation and compilation")
    return "\n".join(rows)


def _head(target: str, config: Config, topology: Topology, remark: str) -> str:
    chip, mesh, train = topology.chip, config.mesh, config.train
    from jaxgpt.parallel import microbatches

    tokens, ways = train.batch_size * config.window, mesh.data * mesh.fsdp
    count, rows = microbatches(train, ways)
    lines = [
        f"{target} on {topology}: {topology.n_devices:,} x {chip.title}",
        f"mesh      data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}",
        f"step      {train.batch_size:,} x {config.window:,} = {tokens:,} tokens in {count} "
        f"microbatch{'es' if count > 1 else ''} of {rows // ways} per device, {train.compute_dtype}, remat {train.remat}",
        f"device    {_si(chip.flops)}FLOP/s, {chip.hbm / 2**30:.2f} GiB at {_si(chip.hbm_bandwidth)}B/s, "
        f"links {_si(chip.link)}B/s, network {_si(chip.network)}B/s",
        *([f"note      {remark}"] if remark else []),
    ]
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / 2**30:9.3f} GiB"


def _duration(low: float, high: float) -> str:
    """Format a range of seconds as `2.2 to 5 h`."""
    unit, size = next(
        ((unit, size) for unit, size in (("days", 86400), ("h", 3600), ("min", 60)) if high >= 2 * size), ("s", 1)
    )
    return f"{low / size:.2g} to {high / size:.2g} {unit}"


def _si(value: float) -> str:
    """Format 1.5e9 as `1.5 G`."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
