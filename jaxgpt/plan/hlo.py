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
        operands, _, _ = self.rest.partition("), ")
        return re.findall(r"%([\w.-]+)", operands)

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
        header = _COMPUTATION.match(line)
        if header:
            body = computations[header["name"]] = {}
            if header["entry"]:
                entry = header["name"]
            continue
        match = _INSTRUCTION.match(line)
        if computations and match:
            body[match["name"]] = Instruction(
                name=match["name"],
                shape=match["shape"],
                opcode=match["opcode"],
                rest=match["rest"],
                root=bool(match["root"]),
            )
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
    header, _, _ = text.partition("\n")
    devices = math.prod(map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)))

    # Count the executions of each computation: its callers' executions, times the trip count of a loop.
    loops = False
    times = defaultdict[str, int](int)
    pending = [(entry, 1)]
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
            collective = _collective(instruction, name, body, devices)
            if collective is None:
                continue
            channel = instruction.find(r"channel_id=(\d+)") or f"{name}/{instruction.name}"
            collectives.setdefault((collective.kind, channel), collective._replace(times=n))
    return list(collectives.values()), loops


def array_bytes(shape: str) -> list[float]:
    """Return the bytes of each array in the text of a shape: 24 and 4 for `(f32[2,3]{1,0}, u32[])`."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        elements = math.prod(int(d) for d in dims.split(",") if d)
        sizes.append(width * elements)
    return sizes


def group_size(line: str, devices: int) -> int:
    """Return the number of devices that participate in a collective, from any of XLA's notations.

    Notations are `{{0,1},{2,3}}`; `{}`, all `devices` of the program; `[2,2]<=[4]`; `mesh['a'=2,'b'=4] {'b'}`, with split
    axes such as `'a':(1)2`; and `source_target_pairs={{0,1},{1,0}}`, counting each device once.
    """
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    if pairs:
        return len(set(re.findall(r"\d+", pairs[1])))

    _, _, text = line.partition("replica_groups=")
    if text.startswith("{}"):
        return devices
    listed = re.match(r"\{\{([\d,]+)\}", text)
    if listed:
        return listed[1].count(",") + 1
    grid = re.match(r"\[\d+,(\d+)\]<=", text)
    if grid:
        return int(grid[1])
    mesh = re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if mesh:
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    raise ValueError(f"unknown syntax of a device group: {text[:80]!r}")


def _trip_count(loop: Instruction, computations: dict[str, Computation]) -> int:
    """Return the trip count of a loop; 1 if unknown.

    The count is the compiler's annotation, or derived from `i < end` and `i + step`, assuming that i starts at 0.
    """
    known = loop.find(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)')
    if known:
        return int(known)

    condition = computations.get(loop.find(r"condition=%?([\w.-]+)"), {})
    body = computations.get(loop.find(r"body=%?([\w.-]+)"), {})
    less = _root(condition)
    results = _root(body)
    if less is None or results is None or "direction=LT" not in less.rest:
        return 1

    # The counter is one element of the tuple that the body returns; the body must add a constant to it.
    counter, end = less.operands
    index = condition[counter].find(r"index=(\d+)") if counter in condition else ""
    if not index or results.opcode != "tuple":
        return 1
    added = body.get(results.operands[int(index)])
    if added is None or added.opcode != "add":
        return 1
    step = _constant(body, added.operands[1])
    if not step:
        return 1
    return max(math.ceil(_constant(condition, end) / step), 1)


def _root(computation: Computation) -> Instruction | None:
    """Return the instruction that returns the result of a computation, or None."""
    return next((each for each in computation.values() if each.root), None)


def _constant(body: Computation, name: str) -> int:
    """Return the value of an integer constant, or 0 for other instructions."""
    if name not in body or body[name].opcode != "constant":
        return 0
    value = re.match(r"-?\d+(?=\))", body[name].rest)
    return int(value[0]) if value else 0


def _collective(instruction: Instruction, computation: str, body: Computation, devices: int) -> Collective | None:
    """Return the collective that an instruction executes or starts, or None."""
    opcode = instruction.opcode
    sizes = array_bytes(instruction.shape)
    # Collectives between TPU slices (MegaScale) are sends from each device to its host.
    transfer = instruction.find(r'_xla_megascale_transfer_type="([A-Z_]+)"') if opcode == "send" else ""
    if transfer:
        slices = 0
        for part in instruction.find(r'_xla_megascale_target="\{([^}]*)\}').split(","):
            ends = part.split(":")
            slices += int(ends[-1]) - int(ends[0]) + 1  # 4 slices for `1:4`
        kind = transfer.lower().replace("_", "-")
        return Collective(kind, sizes[0], slices, between_slices=True)

    kind = opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    # The result of these start instructions also contains the operands and counters.
    if opcode == "collective-permute-start":
        sizes = sizes[1:2]
    elif opcode == "all-gather-start" or (opcode.endswith("-start") and instruction.shape.startswith("((")):
        sizes = sizes[len(sizes) // 2 :]
    # A TPU's fusion of all-reduce and slice is a reduce-scatter.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
        sizes = array_bytes(next(each.shape for each in body.values() if each.root))
    return Collective(kind, sum(sizes), group_size(instruction.rest, devices))
