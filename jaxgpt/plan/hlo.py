"""Read instructions, loops, collectives and their bytes from the HLO text of a compiled program.

A collective in a loop counts once per iteration. The trip count is the compiler's annotation, or derived from a counter with
a constant step and limit, assumed to start at 0. If neither is known, the collective counts once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

WIDTHS = {"pred": 1, "c64": 8, "c128": 16}  # bytes per element of booleans and complex numbers
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """An instruction of a compiled program."""

    name: str
    shape: str  # text of the result's shape
    opcode: str  # operation, such as dot, fusion or all-reduce-start
    rest: str  # text after the opcode: operands and attributes
    root: bool  # whether the instruction returns the result of its computation

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.split("), ")[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that this instruction calls."""
        names: list[str] = re.findall(r"(?:calls|to_apply|body|condition|async_\w+_body)=%?([\w.-]+)", self.rest)
        return names + re.findall(r"[\w.-]+", self.find(r"branch_computations=\{([^}]+)\}"))

    @property
    def path(self) -> str:
        """Source path, such as `jit(train)/jvp(GPT)/.../h_0/attn/attn._project/q_proj/dot_general`, or ""."""
        return self.find(r'op_name="([^"]*)"')

    def find(self, pattern: str) -> str:
        """Return the first group of a pattern's match in the operands and attributes, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""


Computation = dict[str, Instruction]


def read_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a module, keyed by name, and the name of the entry computation."""
    computations: dict[str, Computation] = {}
    entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            body = computations[header["name"]] = {}
            entry = header["name"] if header["entry"] else entry
        elif computations and (match := _INSTRUCTION.match(line)):
            name, root = match["name"], bool(match["root"])
            body[name] = Instruction(name, match["shape"], match["opcode"], match["rest"], root)
    return computations, entry


class Collective(NamedTuple):
    """A collective of a program."""

    kind: str  # one of `COLLECTIVES`
    bytes: float  # bytes of the result per device
    group: int  # number of participating devices; between slices, number of slices
    times: int = 1  # number of executions
    between_slices: bool = False  # whether the network between slices is used, not the links within a slice

    @property
    def sent(self) -> float:
        """Bytes that each device sends per execution with a ring algorithm.

        The ring algorithm is optimal for long messages. For a result of n bytes and g devices, each device sends
        `n * (g - 1) / g` for all-gather and all-to-all, `n * (g - 1)` for reduce-scatter, `2 * n * (g - 1) / g` for
        all-reduce, and n for collective-permute.

        Source: Thakur, Rabenseifner and Gropp 2005, section 4.
        """
        g = self.group
        ways = {"all-reduce": 2 * (g - 1) / g, "reduce-scatter": g - 1, "collective-permute": min(g - 1, 1)}
        return self.bytes * ways.get(self.kind, (g - 1) / g)


def read_program(text: str) -> tuple[list[Collective], bool]:
    """Return the collectives of a compiled program, and whether the program has loops.

    A collective that the compiler split (into start and done, or into fusions that share a channel) counts once. A
    collective that the compiler replaced with a ring of permutes counts as permutes.

    Raises:
        ValueError: if a device group has an unknown syntax.
    """
    computations, entry = read_computations(text)
    devices = math.prod(map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", text.split("\n", 1)[0])))
    loops, times, pending = False, defaultdict[str, int](int), [(entry, 1)]
    while pending:
        name, n = pending.pop()
        times[name] += n
        for instruction in computations.get(name, {}).values():
            loop = instruction.opcode == "while"
            loops |= loop
            trips = _trip_count(instruction, computations) if loop else 1
            pending += [(other, n * trips) for other in instruction.called]
    collectives: dict[tuple[str, str], Collective] = {}
    for name, n in times.items():
        body = computations.get(name, {})
        for instruction in body.values():
            if collective := _collective(instruction, name, body, devices):
                channel = instruction.find(r"channel_id=(\d+)") or f"{name}/{instruction.name}"
                collectives.setdefault((collective.kind, channel), collective._replace(times=n))
    return list(collectives.values()), loops


def array_bytes(shape: str) -> list[float]:
    """Return the bytes of each array in the text of a shape: 24 and 4 for `(f32[2,3]{1,0}, u32[])`."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        sizes.append(width * math.prod(int(d) for d in dims.split(",") if d))
    return sizes


def group_size(line: str, devices: int) -> int:
    """Return the number of devices that participate in a collective, from any of XLA's notations.

    Notations are `{{0,1},{2,3}}`; `{}`, all `devices` of the program; `[2,2]<=[4]`; `mesh['a'=2,'b'=4] {'b'}`, with split
    axes such as `'a':(1)2`; and `source_target_pairs={{0,1},{1,0}}`, counting each device once.
    """
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
        return len(set(re.findall(r"\d+", pairs[1])))
    text = line.partition("replica_groups=")[2]
    if text.startswith("{}"):
        return devices
    if listed := re.match(r"\{\{([\d,]+)\}", text):
        return listed[1].count(",") + 1
    if grid := re.match(r"\[\d+,(\d+)\]<=", text):
        return int(grid[1])
    if mesh := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    raise ValueError(f"unknown syntax of a device group: {text[:80]!r}")


def _trip_count(loop: Instruction, computations: dict[str, Computation]) -> int:
    """Return the trip count of a loop; 1 if unknown.

    The count is the compiler's annotation, or derived from `i < end` and `i + step`, assuming that i starts at 0.
    """
    if known := loop.find(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)'):
        return int(known)
    condition, body = (computations.get(loop.find(rf"{name}=%?([\w.-]+)"), {}) for name in ("condition", "body"))
    less, results = (next((each for each in part.values() if each.root), None) for part in (condition, body))
    if less is None or results is None or "direction=LT" not in less.rest:
        return 1
    counter, end = less.operands
    index = condition[counter].find(r"index=(\d+)") if counter in condition else ""
    added = body.get(results.operands[int(index)]) if index and results.opcode == "tuple" else None
    step = _constant(body, added.operands[1]) if added and added.opcode == "add" else 0
    return max(math.ceil(_constant(condition, end) / step), 1) if step else 1


def _constant(body: Computation, name: str) -> int:
    """Return the value of an integer constant, or 0 for other instructions."""
    value = re.match(r"-?\d+(?=\))", body[name].rest) if name in body and body[name].opcode == "constant" else None
    return int(value[0]) if value else 0


def _collective(instruction: Instruction, computation: str, body: Computation, devices: int) -> Collective | None:
    """Return the collective that an instruction executes or starts, or None."""
    opcode, sizes = instruction.opcode, array_bytes(instruction.shape)
    # Collectives between TPU slices (MegaScale) are sends from each device to its host.
    if opcode == "send" and (kind := instruction.find(r'_xla_megascale_transfer_type="([A-Z_]+)"')):
        ranges = [part.split(":") for part in instruction.find(r'_xla_megascale_target="\{([^}]*)\}').split(",")]
        slices = sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)  # 4 slices for `1:4`
        return Collective(kind.lower().replace("_", "-"), sizes[0], slices, between_slices=True)
    kind = opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    if opcode.endswith("-start") and (
        kind in ("all-gather", "collective-permute") or instruction.shape.startswith("((")
    ):
        # The result of a start instruction also contains the operands and counters.
        sizes = sizes[1:2] if kind == "collective-permute" else sizes[len(sizes) // 2 :]
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):  # a TPU's fusion of all-reduce and slice
        kind, sizes = "reduce-scatter", array_bytes(next(each.shape for each in body.values() if each.root))
    return Collective(kind, sum(sizes), group_size(instruction.rest, devices))
