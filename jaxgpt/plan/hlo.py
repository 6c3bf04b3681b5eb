"""Read what a compiler made: the collectives of a compiled program and the bytes each of them moves.

The text is XLA's (`compiled.as_text()`). A loop's body counts as often as it runs, where a counter goes from 0 to a constant in
constant steps; a loop whose end is decided while it runs counts once, and is reported.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from typing import NamedTuple

WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OPCODE = re.compile(r" = (?P<shape>.*?) (?P<op>[a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition|async_execution_thread_body)=%?([\w.-]+)")


class Collective(NamedTuple):
    """One collective of a program, as every device takes part in it.

    Attributes:
        kind: of `KINDS`.
        bytes: of its result on a device (all-gather: the whole; reduce-scatter: the part).
        group: devices that take part together; between slices: one of each.
        times: how often it runs.
        between_slices: whether it goes over the network; else over the links within a slice.
    """

    kind: str
    bytes: float
    group: int
    times: int = 1
    between_slices: bool = False

    @property
    def sent(self) -> float:
        """Bytes that each device sends, every time it runs, by the ring that is optimal for long messages.

        all-gather and all-to-all of a result of n bytes over g devices: `n (g - 1) / g`; reduce-scatter to n bytes:
        `n (g - 1)`; all-reduce: `2 n (g - 1) / g`; permute: n.

        Source: Thakur, Rabenseifner and Gropp 2005, section 4.
        """
        g = self.group
        ways = {"all-reduce": 2 * (g - 1) / g, "reduce-scatter": g - 1, "collective-permute": min(g - 1, 1)}
        return self.bytes * ways.get(self.kind, (g - 1) / g)


class Program(NamedTuple):
    """What the text says.

    Attributes:
        collectives: each once.
        loops: trips of every loop, by the name of its body; None where they are not known before it runs.
    """

    collectives: tuple[Collective, ...]
    loops: dict[str, int | None]


def read_program(text: str) -> Program:
    """The collectives of a compiled program.

    A collective that the compiler spread over several steps (start and done, or pieces fused into other work under one
    channel) counts once; what it turned into a ring of permutes is what it turned it into.

    Raises:
        ValueError: a group of devices is written in a way that is not known here.
    """
    computations, entry = split_computations(text)
    loops: dict[str, int | None] = {}
    calls: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, lines in computations.items():
        for line in lines:
            called = _CALLS.findall(line)
            trips: int | None = 1
            if body := re.search(r"\bwhile\(.*body=%?([\w.-]+)", line):
                condition = re.search(r"condition=%?([\w.-]+)", line)
                parts = computations.get(condition[1] if condition else "", []), computations.get(body[1], [])
                trips = _trips(line, *parts)
                loops[body[1]] = trips
            if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
                called += [branch.strip().lstrip("%") for branch in branches[1].split(",")]
            calls[name] += [(other, 1 if trips is None else trips) for other in called]
    times = _multiplicities(calls, entry)
    found: dict[tuple[str, str], Collective] = {}
    for name, lines in computations.items():
        if times[name]:
            for number, line in enumerate(lines):
                if one := _collective(line, times[name]):
                    one = _scattered(one, name, lines)
                    channel = re.search(r"channel_id=(\d+)", line)
                    found.setdefault((one.kind, channel[1] if channel else f"{name}:{number}"), one)
    return Program(tuple(found.values()), loops)


def array_bytes(shape: str) -> list[float]:
    """Bytes of every array in the text of a shape; `(f32[2,3]{1,0}, u32[])` has 24 and 4."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        sizes.append(width * math.prod(int(d) for d in dims.split(",") if d))
    return sizes


def members(line: str) -> tuple[int, ...]:
    """The first group of devices in the text of a collective, in any of the ways in which XLA writes it.

    `{{0,1},{2,3}}`; `[2,2]<=[4]`, with `T(1,0)` transposed; `mesh['a'=2,'b'=4] {'b'}`, axes split as in `'a':(1)2`, devices in
    the order of `device_ids=([4,2]T(1,0))`;
    `source_target_pairs={{0,1},{1,0}}`, of which everyone is a member.
    """
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
        return tuple(sorted({int(n) for n in re.findall(r"\d+", pairs[1])}))
    text = line.partition("replica_groups=")[2]
    if listed := re.match(r"\{\{([\d,]+)\}", text):
        return tuple(map(int, listed[1].split(",")))
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        _, size = (int(n) for n in iota[1].split(","))
        return tuple(itertools.islice(_walk(*_grid(iota[2], iota[3])), size))
    if mesh := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}", text):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        places = _along(sizes, re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[4]))
        if not mesh[2]:
            return places
        devices = list(_walk(*_grid(mesh[2], mesh[3])))
        return tuple(devices[place] for place in places)
    raise ValueError(f"a group of devices that is written in an unknown way: {text[:80]!r}")


def _grid(dims: str, order: str | None) -> tuple[list[int], list[int]]:
    sizes = [int(n) for n in dims.split(",")]
    return sizes, [int(n) for n in order.split(",")] if order else list(range(len(sizes)))


def _walk(dims: list[int], order: list[int]) -> itertools.chain[int]:
    """The numbers of a grid in the order in which its transpose is read."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    places = itertools.product(*(range(dims[i]) for i in order))
    return itertools.chain(sum(p * strides[i] for p, i in zip(place, order, strict=True)) for place in places)


def _along(sizes: dict[str, int], axes: list[tuple[str, str, str]]) -> tuple[int, ...]:
    """The devices that are reached from the first one along some axes of a mesh, or along parts of them."""
    strides, inner = {}, 1
    for name in reversed(sizes):
        strides[name] = inner
        inner *= sizes[name]
    steps = []
    for name, before, size in axes:
        # 'a':(2)4 is the middle part of an axis: 2 before it, 4 of it, the rest after it.
        n = int(size or sizes[name])
        after = sizes[name] // (int(before or 1) * n)
        steps.append([i * after * strides[name] for i in range(n)])
    return tuple(sum(place) for place in itertools.product(*steps))


def split_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Computations of a module by name, as lines; and the name of the one that is run."""
    computations: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name and line.startswith("  "):
            computations[name].append(line)
    return computations, entry


def _trips(line: str, condition: list[str], body: list[str]) -> int | None:
    """How often a loop runs: as the compiler notes it, or `i < end` with i from 0, and `i + step` in the body."""
    if known := re.search(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)', line):
        return int(known[1])
    less = re.search(r"ROOT .* compare\(%?([\w.-]+), %?([\w.-]+)\), direction=LT", "\n".join(condition))
    end = _constant(condition, less[2]) if less else None
    place = re.search(r"index=(\d+)", _definition(condition, less[1])) if less else None
    results = re.search(r"ROOT .* tuple\((.*?)\)", "\n".join(body))
    if end is None or place is None or results is None:
        return None
    names = re.findall(r"%([\w.-]+)", results[1])
    added = re.search(r" add\(%?([\w.-]+), %?([\w.-]+)\)", _definition(body, names[int(place[1])]))
    step = _constant(body, added[2]) if added else None
    return math.ceil(end / step) if step else None


def _definition(lines: list[str], name: str) -> str:
    return next((line for line in lines if re.match(rf"\s*(ROOT )?%?{re.escape(name)} = ", line)), "")


def _constant(lines: list[str], name: str) -> int | None:
    found = re.search(r" constant\((-?\d+)\)", _definition(lines, name))
    return int(found[1]) if found else None


def _multiplicities(calls: dict[str, list[tuple[str, int]]], entry: str) -> dict[str, int]:
    """How often every computation runs, loops within loops multiplied."""
    times: dict[str, int] = defaultdict(int)
    waiting = [(entry, 1)]
    while waiting:
        name, n = waiting.pop()
        times[name] += n
        waiting += [(other, n * trips) for other, trips in calls.get(name, [])]
    return times


def _collective(line: str, times: int) -> Collective | None:
    found = _OPCODE.search(line)
    if not found:
        return None
    sizes = array_bytes(found["shape"])
    # Between slices a TPU hands its part to its host (MegaScale), which does the rest.
    if found["op"] == "send" and (kind := re.search(r'_xla_megascale_transfer_type="([A-Z_]+)"', line)):
        target = re.search(r'_xla_megascale_target="\{([^}]*)\}', line)
        slices = sum(_length(part) for part in (target[1] if target else "").split(","))
        return Collective(kind[1].lower().replace("_", "-"), sizes[0], slices, times, True)
    name = found["op"].removesuffix("-start")
    if name not in KINDS:
        return None
    if found["op"].endswith("-start") and name in ("all-gather", "collective-permute"):
        # The start's result holds its operands, too, and counters.
        sizes = sizes[1:2] if name == "collective-permute" else sizes[len(sizes) // 2 :]
    return Collective(name, sum(sizes), len(members(line)), times)


def _scattered(one: Collective, computation: str, lines: list[str]) -> Collective:
    """A TPU's reduce-scatter is written as a fused all-reduce, of which every device cuts out its part."""
    part = _OPCODE.search(lines[-1])
    if one.kind != "all-reduce" or not computation.startswith("all-reduce-scatter") or not part:
        return one
    return one._replace(kind="reduce-scatter", bytes=sum(array_bytes(part["shape"])))


def _length(part: str) -> int:
    """How many numbers `3` or `1:4` stands for."""
    first, _, last = part.partition(":")
    return int(last or first) - int(first) + 1
