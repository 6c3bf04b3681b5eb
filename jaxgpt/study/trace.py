"""Attribute the device time of a training step to kinds of work, from a profiler trace and the compiled program."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.plan.hlo import KINDS as COLLECTIVES
from jaxgpt.plan.hlo import split_computations

PRODUCTS = ("dot", "convolution")
CALLS = ("fusion", "call")
KINDS = {
    "products": "matrix products with weights: projections, MLP, head",
    "attention": "scores, softmax, mixing",
    "elementwise": "norms, activations, residuals, embeddings, loss, copies",
    "optimizer": "gradient norm, update, weight average",
    "communication": "collectives, including waiting for the slowest device",
}

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(?P<name>[\w.-]+) = .*? (?P<op>[a-z][\w-]*)\(")
_COLUMN = re.compile(r"= \w+\[\d+,1\]")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")


class DeviceTime(NamedTuple):
    """Device time between the first and the last instruction of a trace.

    Attributes:
        seconds: by kind (`KINDS` and `idle`), summed over devices.
        span: wall-clock seconds.
    """

    seconds: dict[str, float]
    span: float

    @property
    def shares(self) -> dict[str, float]:
        """Share of each kind in the total device time."""
        whole = sum(self.seconds.values())
        return {kind: seconds / whole for kind, seconds in self.seconds.items()}


def instruction_kinds(program: str) -> dict[str, str]:
    """Classify every instruction of a compiled training step (`compiled.as_text()`) as one of `KINDS`.

    A fusion has the kind of its matrix product if it contains one, else of its first instruction with a source path. Paths of
    the differentiated part contain `jvp`; everything else is the optimizer.

    Returns:
        Instruction name to kind.
    """
    bodies, _ = split_computations(program)
    found = {}
    for body in bodies.values():
        parts = {part.name: part for line in body if (part := _read(line, bodies)) and not _is_loop_of_steps(part)}
        for part in parts.values():
            # The CPU compiler splits the products of attention and drops their source paths.
            near = [part.path] if part.path or not part.product else _paths_around(part, parts)
            found[part.name] = _kind(part, near)
    return found


def record_trace(work: Callable[[], Any]) -> jax.profiler.ProfileData:
    """Profile `work`, which must block until its devices are done."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        return jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))


def device_time(profile: jax.profiler.ProfileData, kind_of: Mapping[str, str], devices: int) -> DeviceTime:
    """Sum the time of a trace by kind.

    Args:
        profile: a trace of the program alone.
        kind_of: instruction name to kind.
        devices: number of devices of this process. Device time that no instruction accounts for is idle.

    Raises:
        ValueError: the trace contains no instruction of the program.
    """
    times: dict[str, float] = defaultdict(float, dict.fromkeys(KINDS, 0.0))
    first, last = float("inf"), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised inside jaxlib 0.12 on reading `event.stats`
        for line in _lines(profile):
            events = [(e.start_ns, e.end_ns, name) for e in line.events if (name := _instruction(e, kind_of))]
            for start, end, _ in events:
                first, last = min(first, start), max(last, end)
            for name, own in own_times(events):
                times[kind_of[name]] += own * 1e-9
    if not last:
        raise ValueError("the trace contains no instruction of the program")
    span = (last - first) * 1e-9
    return DeviceTime(dict(times) | {"idle": max(devices * span - sum(times.values()), 0.0)}, span)


def own_times(events: Iterable[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """Yield (name, time) for each event of one thread, (start, end, name), without the time of events nested in it."""
    open_events: list[list[Any]] = []  # stack of [end, name, own time]
    for start, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][0] <= start:
            yield (done := open_events.pop())[1], done[2]
        if open_events:
            open_events[-1][2] -= min(end, open_events[-1][0]) - start
        open_events.append([end, name, end - start])
    yield from ((name, own) for _, name, own in open_events)


def _lines(profile: jax.profiler.ProfileData) -> Iterator[Any]:
    """Yield the threads or streams that run instructions: of the devices, or on a CPU of the host."""
    planes = {plane.name: list(plane.lines) for plane in profile.planes}
    # libtpu adds a device without lines.
    devices = [lines for name, lines in planes.items() if name.startswith("/device:") and lines]
    for lines in devices or [planes.get("/host:CPU", [])]:
        # "XLA Ops" holds the events of all streams by instruction: reading both would count them twice.
        yield from [line for line in lines if line.name == "XLA Ops"] or lines


def _instruction(event: Any, kind_of: Mapping[str, str]) -> str:
    """Return the name of an event's instruction; "" for other events. GPU kernels carry it in a statistic."""
    name = event.name.split(" = ")[0].lstrip("%")
    if name in kind_of:
        return name
    return next((value for key, value in event.stats if key == "hlo_op" and value in kind_of), "")


class _Part(NamedTuple):
    name: str
    op: str
    operands: list[str]
    path: str  # source path, such as `jit(train_step)/jvp(GPT)/.../h_0/attn/q_proj/dot_general`
    product: bool


def _read(line: str, bodies: Mapping[str, list[str]]) -> _Part | None:
    """Parse an instruction. A fusion or call takes the path of its product, or of its first instruction that has one."""
    instruction = _INSTRUCTION.match(line)
    if not instruction:
        return None
    name, op = instruction["name"], instruction["op"]
    operands = re.findall(r"%([\w.-]+)", line[instruction.end() :].split("), ")[0])
    inner = [each for called in _CALLED.findall(line) for each in bodies.get(called, [])] if op in CALLS else []
    products = [part for part in (line, *inner) if _is_product(part)]
    path = next(filter(None, map(_path, products or (line, *inner))), "")
    return _Part(name, op, operands, path, bool(products))


def _paths_around(part: _Part, parts: Mapping[str, _Part]) -> list[str]:
    """Return the paths of an instruction's operands and users, looking up to two steps past those without a path."""
    paths, seen, pending = [], {part.name}, [(part, 0)]
    while pending:
        here, steps = pending.pop(0)
        neighbors = [parts[name] for name in here.operands if name in parts]
        neighbors += [other for other in parts.values() if here.name in other.operands]
        for other in neighbors:
            if other.name not in seen:
                seen.add(other.name)
                paths.append(other.path)
                pending += [(other, steps + 1)] if not other.path and steps < 2 else []
    return paths


def _kind(part: _Part, paths: Sequence[str]) -> str:
    if part.op.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return "communication"
    if any("/attn/" in path and "_proj" not in path for path in paths):
        return "attention"
    if any(path.startswith("jit(") and "jvp(" not in path for path in paths):
        return "optimizer"
    return "products" if part.product else "elementwise"


def _is_loop_of_steps(part: _Part) -> bool:
    """Return whether this is the loop of several steps per call, whose own time is overhead."""
    return part.op == "while" and "jvp(" not in part.path


def _is_product(line: str) -> bool:
    instruction = _INSTRUCTION.match(line)
    op = instruction["op"] if instruction else ""
    if op == "dot" and _COLUMN.search(line):  # the gradient of a bias: a sum over tokens, as a product with ones
        return False
    return op in PRODUCTS or (op == "custom-call" and "dot_general" in _path(line))


def _path(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""
