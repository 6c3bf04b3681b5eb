"""Read the text of a compiled program (HLO): its collectives, and whether it has loops."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxgpt.plan.collectives import COLLECTIVES, Collective
from jaxgpt.plan.device_groups import read_group
from jaxgpt.plan.executions import count_executions
from jaxgpt.plan.hlo import Computation, Instruction, array_bytes, read_computations, root_of
from jaxgpt.plan.source_paths import site_of


class ProgramText(NamedTuple):
    """Facts that the text of a compiled program shows.

    Attributes:
        collectives: the collectives of the program.
        has_loops: whether the program has loops.
    """

    collectives: list[Collective]
    has_loops: bool


def read_program(text: str, mesh: Mapping[str, int] | None = None) -> ProgramText:
    """Return the collectives of a compiled program, and whether the program has loops.

    A collective that the compiler split into start and done counts once. Fusions with parts of one collective also count
    once: they share a channel, a result and a place in the source. Every other instruction counts. The channel alone does
    not identify a collective: all collectives in `jax.shard_map` have channel 1. A collective that the compiler replaced with
    a ring of permutes counts as permutes.

    Args:
        text: HLO text.
        mesh: size of each axis of the mesh, in the order of the devices, to name the axes of each collective.

    Raises:
        ValueError: if a device group has an unknown syntax.
    """
    computations, entry = read_computations(text)
    header, _, _ = text.partition("\n")
    devices = math.prod(map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)))

    executions = count_executions(computations, entry)
    called = [computations.get(name, {}).values() for name in executions]
    instructions = [each for body in called for each in body]
    has_loops = any(each.opcode == "while" for each in instructions)
    fused = {name for each in instructions if each.opcode == "fusion" for name in each.called}

    collectives: dict[tuple[str, ...], Collective] = {}
    for name, n in executions.items():
        body = computations.get(name, {})
        for instruction in body.values():
            collective = _collective(instruction, name, body, devices, mesh or {})
            if collective is None:
                continue
            # Every instruction is a separate collective, except the fused parts of one collective.
            key: tuple[str, ...] = (name, instruction.name)
            channel = instruction.find(r"channel_id=(\d+)")
            if name in fused and channel:
                key = (collective.kind, channel, str(collective.bytes), instruction.path)
            collectives.setdefault(key, collective._replace(times=n))
    return ProgramText(collectives=list(collectives.values()), has_loops=has_loops)


def _collective(
    instruction: Instruction, computation: str, body: Computation, devices: int, mesh: Mapping[str, int]
) -> Collective | None:
    """Return the collective that an instruction executes or starts, or None."""
    opcode = instruction.opcode
    if opcode == "send":
        return _between_slices(instruction)
    kind = opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None

    sizes = _result_bytes(instruction)
    # A TPU's fusion of all-reduce and slice is a reduce-scatter.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
        root = root_of(body)
        assert root is not None
        sizes = array_bytes(root.shape)

    group = read_group(instruction.rest, devices)
    axes = group.axes(mesh) if mesh else ()
    site = site_of(instruction.path)
    if len(sizes) > 1 and site:  # one instruction for the arrays of several places
        site = f"{site} and {len(sizes) - 1} more"
    return Collective(kind, sum(sizes), len(group.devices), axes=axes, site=site)


def _result_bytes(instruction: Instruction) -> list[float]:
    """Return the bytes of each result of a collective instruction.

    The shape of some start instructions also contains the operands, before the results, and counters, after the results.
    """
    opcode = instruction.opcode
    sizes = array_bytes(instruction.shape)
    has_operands = instruction.shape.startswith("((")
    if opcode == "collective-permute-start":
        arrays = len(instruction.operands) if has_operands else 1  # GPUs send several arrays in one instruction
        return sizes[arrays : 2 * arrays]
    if opcode == "all-gather-start" or (opcode.endswith("-start") and has_operands):
        return sizes[len(sizes) // 2 :]
    return sizes


def _between_slices(send: Instruction) -> Collective | None:
    """Return the collective between TPU slices (MegaScale) that sends arrays from each device to its host, or None."""
    transfer = send.find(r'_xla_megascale_transfer_type="([A-Z_]+)"')
    if not transfer:
        return None
    return Collective(
        kind=transfer.lower().replace("_", "-"),
        bytes=array_bytes(send.shape)[0],
        group=_count_numbers(send.find(r'_xla_megascale_target="\{([^}]*)\}')),
        between_slices=True,
        axes=("data",),
        site=site_of(send.path),
    )


def _count_numbers(text: str) -> int:
    """Count the numbers in a list of numbers and ranges: 4 for `1:4`, and 3 for `0,2:3`."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition(":")
        count += int(last or first) - int(first) + 1
    return count
