"""Find the collectives of a compiled program, and the bytes they move, in its HLO text (`compiled.as_text()`).

The body of a loop is multiplied by its trip count if a counter runs from 0 to a constant in constant steps. A loop with a
data-dependent end counts once, and its trip count is reported as None.
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
    """A collective of a program.

    Attributes:
        kind: one of `KINDS`.
        bytes: size of its result on one device.
        group: number of devices that take part together; between slices, number of slices.
        times: number of times it runs.
        between_slices: whether it uses the network between slices, not the links within one.
    """

    kind: str
    bytes: float
    group: int
    times: int = 1
    between_slices: bool = False

    @property
    def sent(self) -> float:
        """Bytes that each device sends per run with a ring algorithm, which is optimal for long messages.

        For a result of n bytes and g devices: `n (g - 1) / g` for all-gather and all-to-all, `n (g - 1)` for reduce-scatter,
        `2 n (g - 1) / g` for all-reduce, n for collective-permute.

        Source: Thakur, Rabenseifner and Gropp 2005, section 4.
        """
        g = self.group
        ways = {"all-reduce": 2 * (g - 1) / g, "reduce-scatter": g - 1, "collective-permute": min(g - 1, 1)}
        return self.bytes * ways.get(self.kind, (g - 1) / g)


class ParsedProgram(NamedTuple):
    """The collectives and loops of a compiled program.

    Attributes:
        collectives: the collectives, each once.
        loops: trip count of every loop by the name of its body; None if it is not a constant.
    """

    collectives: tuple[Collective, ...]
    loops: dict[str, int | None]


def read_program(text: str) -> ParsedProgram:
    """Parse the collectives and loops of a compiled program.

    A collective that the compiler split (into start and done, or into fusions that share a channel) counts once. One that it
    turned into a ring of permutes counts as those permutes.

    Raises:
        ValueError: unknown syntax of a device group.
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
    return ParsedProgram(tuple(found.values()), loops)


def array_bytes(shape: str) -> list[float]:
    """Return the bytes of each array in the text of a shape: 24 and 4 for `(f32[2,3]{1,0}, u32[])`."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        sizes.append(width * math.prod(int(d) for d in dims.split(",") if d))
    return sizes


def members(line: str) -> tuple[int, ...]:
    """Return the first group of devices of a collective, in any of XLA's notations.

    `{{0,1},{2,3}}`; `[2,2]<=[4]`, transposed with `T(1,0)`; `mesh['a'=2,'b'=4] {'b'}`, with split axes such as `'a':(1)2` and
    devices ordered by `device_ids=([4,2]T(1,0))`; `source_target_pairs={{0,1},{1,0}}`, with all devices as members.
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
    raise ValueError(f"unknown syntax of a device group: {text[:80]!r}")


def _grid(dims: str, order: str | None) -> tuple[list[int], list[int]]:
    sizes = [int(n) for n in dims.split(",")]
    return sizes, [int(n) for n in order.split(",")] if order else list(range(len(sizes)))


def _walk(dims: list[int], order: list[int]) -> itertools.chain[int]:
    """Iterate over the elements of a transposed grid in row-major order."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    places = itertools.product(*(range(dims[i]) for i in order))
    return itertools.chain(sum(p * strides[i] for p, i in zip(place, order, strict=True)) for place in places)


def _along(sizes: dict[str, int], axes: list[tuple[str, str, str]]) -> tuple[int, ...]:
    """Return the devices reached from the first one along some axes of a mesh, or along parts of them."""
    strides, inner = {}, 1
    for name in reversed(sizes):
        strides[name] = inner
        inner *= sizes[name]
    steps = []
    for name, before, size in axes:
        # 'a':(2)4 is the middle factor of an axis of size 2 * 4 * rest.
        n = int(size or sizes[name])
        after = sizes[name] // (int(before or 1) * n)
        steps.append([i * after * strides[name] for i in range(n)])
    return tuple(sum(place) for place in itertools.product(*steps))


def split_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Split a module into the lines of its computations by name; also return the name of the entry computation."""
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
    """Return the trip count of a loop: from the compiler's annotation, or from `i < end` and `i + step` with i from 0."""
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
    """Count how often each computation runs, multiplying the trip counts of nested loops."""
    times: dict[str, int] = defaultdict(int)
    pending = [(entry, 1)]
    while pending:
        name, n = pending.pop()
        times[name] += n
        pending += [(other, n * trips) for other, trips in calls.get(name, [])]
    return times


def _collective(line: str, times: int) -> Collective | None:
    found = _OPCODE.search(line)
    if not found:
        return None
    sizes = array_bytes(found["shape"])
    # Collectives between TPU slices (MegaScale) are sends from each device to its host.
    if found["op"] == "send" and (kind := re.search(r'_xla_megascale_transfer_type="([A-Z_]+)"', line)):
        target = re.search(r'_xla_megascale_target="\{([^}]*)\}', line)
        slices = sum(_length(part) for part in (target[1] if target else "").split(","))
        return Collective(kind[1].lower().replace("_", "-"), sizes[0], slices, times, True)
    name = found["op"].removesuffix("-start")
    if name not in KINDS:
        return None
    if found["op"].endswith("-start") and name in ("all-gather", "collective-permute"):
        # The result of the start contains its operands and counters as well.
        sizes = sizes[1:2] if name == "collective-permute" else sizes[len(sizes) // 2 :]
    return Collective(name, sum(sizes), len(members(line)), times)


def _scattered(one: Collective, computation: str, lines: list[str]) -> Collective:
    """Recognize a TPU's reduce-scatter: a fusion of an all-reduce and a slice."""
    part = _OPCODE.search(lines[-1])
    if one.kind != "all-reduce" or not computation.startswith("all-reduce-scatter") or not part:
        return one
    return one._replace(kind="reduce-scatter", bytes=sum(array_bytes(part["shape"])))


def _length(part: str) -> int:
    """Return the length of a range: 1 for `3`, 4 for `1:4`."""
    first, _, last = part.partition(":")
    return int(last or first) - int(first) + 1
