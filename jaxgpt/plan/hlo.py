"""Read instructions, loops, collectives and their bytes from the HLO text of a compiled program.

A collective in a loop counts once per iteration. The trip count is the compiler's annotation, or derived from a counter with
a constant step and limit, assumed to start at 0. If neither is known, the collective counts once. Every branch of a
conditional counts as executed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

WIDTHS = {"pred": 1, "c64": 8, "c128": 16}  # bytes per element of booleans and complex numbers
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Parts of a path that JAX adds for loops, calls, rematerialization and shards.
CONTROL = ("while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map")

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)"
)
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
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
    body: Computation = {}  # instructions after the last header
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            body = {}
            computations[header["name"]] = body
            if header["entry"]:
                entry = header["name"]
            continue
        match = _INSTRUCTION.match(line)
        if match:
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
    axes: tuple[str, ...] = ()  # axes of the mesh along which the devices of a group differ; (): unknown
    site: str = ""  # name of the data, or place in the source, such as `h/attn/q_proj`
    avoidable: int = 0  # estimates: number of these executions that a program may avoid

    @property
    def needed(self) -> int:
        """Number of executions that every program needs."""
        return self.times - self.avoidable

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


def read_program(text: str, mesh: Mapping[str, int] | None = None) -> tuple[list[Collective], bool]:
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

    executions = _count_executions(computations, entry)
    called = [computations.get(name, {}).values() for name in executions]
    instructions = [each for body in called for each in body]
    loops = any(each.opcode == "while" for each in instructions)
    fused = {name for each in instructions if each.opcode == "fusion" for name in each.called}

    collectives: dict[tuple[str, ...], Collective] = {}
    for name, n in executions.items():
        body = computations.get(name, {})
        for instruction in body.values():
            collective = _collective(instruction, name, body, devices, mesh or {})
            if collective is None:
                continue
            key: tuple[str, ...] = (name, instruction.name)
            channel = instruction.find(r"channel_id=(\d+)")
            if name in fused and channel:
                key = (collective.kind, channel, str(collective.bytes), instruction.path)
            collectives.setdefault(key, collective._replace(times=n))
    return list(collectives.values()), loops


def _count_executions(computations: dict[str, Computation], entry: str) -> dict[str, int]:
    """Count the executions of each computation: its callers' executions, times the trip count of a loop."""
    executions = defaultdict[str, int](int)
    pending = [(entry, 1)]
    while pending:
        name, n = pending.pop()
        executions[name] += n
        for instruction in computations.get(name, {}).values():
            # An asynchronous call may name its computation again where it ends.
            if instruction.opcode.endswith(("-update", "-done")):
                continue
            trips = _trip_count(instruction, computations) if instruction.opcode == "while" else 1
            pending += [(other, n * trips) for other in instruction.called]
    return executions


def array_bytes(shape: str) -> list[float]:
    """Return the bytes of each array in the text of a shape: 24 and 4 for `(f32[2,3]{1,0}, u32[])`."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        elements = math.prod(int(d) for d in dims.split(",") if d)
        sizes.append(width * elements)
    return sizes


def group_of(line: str, devices: int) -> list[int]:
    """Return the numbers of the devices in the first group of a collective, from any of XLA's notations.

    Notations are `{{0,1},{2,3}}`; `{}`, all `devices` of the program; `[2,2]<=[4]` with an optional transposition `T(1,0)`;
    `mesh['a'=2,'b'=4] {'b'}`, with split axes such as `'a':(1)2`; and `source_target_pairs={{0,1},{1,0}}`, all devices of
    the pairs.
    """
    pairs = _PAIRS.search(line)
    if pairs:
        return sorted(set(_integers(pairs[1])))

    _, _, text = line.partition("replica_groups=")
    if text.startswith("{}"):
        return list(range(devices))
    listed = re.match(r"\{\{([\d,]+)\}", text)
    if listed:
        return _integers(listed[1])
    grid = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if grid:
        groups = _arranged(grid[2], grid[3]).reshape(_integers(grid[1]))
        return [int(each) for each in groups[0]]
    mesh = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        numbers = _arranged(mesh[2] or str(math.prod(sizes.values())), mesh[3]).reshape(list(sizes.values()))
        return _along(numbers, sizes, mesh[4])
    raise ValueError(f"unknown syntax of a device group: {text[:80]!r}")


def _arranged(shape: str, order: str | None) -> np.ndarray:
    """Return the numbers from 0 in an array of this shape, transposed by `order`."""
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_integers(order)) if order else numbers


def _along(numbers: np.ndarray, sizes: Mapping[str, int], names: str) -> list[int]:
    """Return the first devices along axes of a mesh; the axis `'a':(2)4` is the middle of the axis a split in 2, 4, rest."""
    wanted = {name: (before, part) for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", names)}
    shape = list[int]()
    chosen = list[int | slice]()
    for name, size in sizes.items():
        before, part = wanted.get(name, ("1", "1"))
        first = int(before or 1)
        middle = int(part or size)
        shape += [first, middle, size // (first * middle)]
        chosen += [0, slice(None), 0]
    return [int(each) for each in numbers.reshape(shape)[tuple(chosen)].reshape(-1)]


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def axes_of(line: str, group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh along which the devices of a collective differ, with the sizes of all axes in `mesh`.

    A permutation has the axes along which its sources differ from their targets.
    """
    shape = tuple(mesh.values())
    pairs = _PAIRS.search(line)
    ends = [group]
    if pairs:
        numbers = _integers(pairs[1])
        ends = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    found = set[str]()
    for each in ends:
        if max(each, default=0) >= math.prod(shape):
            return ()
        places = np.unravel_index(np.asarray(each), shape)
        found |= {name for name, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1}
    return tuple(name for name in mesh if name in found)


def scopes_of(path: str) -> list[str]:
    """Return the modules and methods in a source path, from the outermost, without the transformations of JAX.

    The compiler joins the paths of merged instructions: `a/b/mul;a/c/add` and, with a common beginning, `a/(b/mul:c/add)`.
    The result is the scopes of the first path, or of the common beginning: `["a", "b"]` and `["a"]`.
    """
    first, _, _ = path.partition(";")
    common, joined, _ = first.partition("/(")
    scopes = common.split("/")
    if not joined:
        scopes.pop()  # the operation
    return [scope for scope in scopes if re.fullmatch(r"[\w.]+", scope) and scope not in CONTROL]


def site_of(path: str) -> str:
    """Shorten a source path to the modules of a layer, without the number of the block: `h/attn/q_proj, backward`."""
    names = scopes_of(path)
    layer = next((i for i, name in enumerate(names) if re.fullmatch(r"h(_\d+)?", name)), None)
    if layer is not None:
        inner = [name for name in names[layer + 1 :] if "." not in name]
        names = ["/".join(["h", *inner])]
    if not names:
        return ""
    return f"{names[-1]}, backward" if "transpose(" in path else names[-1]


def _trip_count(loop: Instruction, computations: dict[str, Computation]) -> int:
    """Return the trip count of a loop; 1 if unknown.

    The count is the compiler's annotation, or derived from `i < end` and `i + step`, assuming that i starts at 0.
    """
    known = loop.find(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)')
    if known:
        return int(known)

    condition = _inlined(computations.get(loop.find(r"condition=%?([\w.-]+)"), {}), computations)
    body = _inlined(computations.get(loop.find(r"body=%?([\w.-]+)"), {}), computations)
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


def _inlined(computation: Computation, computations: dict[str, Computation]) -> Computation:
    """Return a computation with the instructions of its scalar fusions in the place of the fusions.

    An instruction of a fusion is named `FUSION.INSTRUCTION`; the fusion's result keeps its name.
    """
    result: Computation = {}
    for outer in computation.values():
        is_scalar = re.match(r"\w+\[\]", outer.shape) is not None
        if outer.opcode != "fusion" or not is_scalar:
            result[outer.name] = outer
            continue
        fused = computations.get(outer.called[0], {})
        names = _names_outside(fused, outer)
        for inner in fused.values():
            if inner.opcode != "parameter":
                name = names[inner.name]
                rest = _renamed(inner.rest, names)
                result[name] = inner._replace(name=name, rest=rest, root=inner.root and outer.root)
    return result


def _names_outside(fused: Computation, outer: Instruction) -> dict[str, str]:
    """Return the name that each instruction of a fusion has in `_inlined`; a parameter has the name of the operand."""
    names = {}
    for inner in fused.values():
        if inner.opcode == "parameter":
            number, _, _ = inner.rest.partition(")")
            names[inner.name] = outer.operands[int(number)]
        elif inner.root:
            names[inner.name] = outer.name
        else:
            names[inner.name] = f"{outer.name}.{inner.name}"
    return names


def _renamed(rest: str, names: Mapping[str, str]) -> str:
    """Replace the names of instructions in the operands of an instruction."""
    return re.sub(r"%([\w.-]+)", lambda found: "%" + names.get(found[1], found[1]), rest)


def _root(computation: Computation) -> Instruction | None:
    """Return the instruction that returns the result of a computation, or None."""
    return next((each for each in computation.values() if each.root), None)


def _constant(body: Computation, name: str) -> int:
    """Return the value of an integer constant, or 0 for other instructions."""
    if name not in body or body[name].opcode != "constant":
        return 0
    value = re.match(r"-?\d+(?=\))", body[name].rest)
    return int(value[0]) if value else 0


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

    # The result of these start instructions also contains the operands and counters.
    sizes = array_bytes(instruction.shape)
    if opcode == "collective-permute-start":
        sizes = sizes[1:2]
    elif opcode == "all-gather-start" or (opcode.endswith("-start") and instruction.shape.startswith("((")):
        sizes = sizes[len(sizes) // 2 :]
    # A TPU's fusion of all-reduce and slice is a reduce-scatter.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
        root = _root(body)
        assert root is not None
        sizes = array_bytes(root.shape)

    group = group_of(instruction.rest, devices)
    axes = axes_of(instruction.rest, group, mesh) if mesh else ()
    site = site_of(instruction.path)
    if len(sizes) > 1 and site:  # one instruction for the arrays of several places
        site = f"{site} and {len(sizes) - 1} more"
    return Collective(kind, sum(sizes), len(group), axes=axes, site=site)
