"""Attribute the device time of a training step to kinds of work, from a profiler trace."""

from __future__ import annotations

import itertools
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.plan.collectives import COLLECTIVES
from jaxgpt.plan.hlo import Computation, Instruction, read_computations

WORK = {
    "products": "matrix products with weights: projections, MLP, head",
    "attention": "norms and RoPE of queries and keys, scores, softmax, mixing",
    "elementwise": "norms, activations, residuals, embeddings, loss, copies",
    "optimizer": "gradient norm, update, EMA",
    "communication": "collectives, including waiting for the slowest device",
}
NEAR = 2  # steps to a neighbor: a product, an instruction without a path such as a copy, and an instruction with a path


def instruction_kinds(program: str) -> dict[str, str]:
    """Classify the instructions of a compiled training step (`compiled.as_text()`) by the kinds of `WORK`.

    A fusion has the kind of its first matrix product; without a product, the kind of its first source path. Paths
    of the differentiated part contain `jvp`; other paths count as optimizer.
    """
    computations, _ = read_computations(program)
    kinds = {}
    for body in computations.values():
        work = {name: _work_of(instruction, computations) for name, instruction in body.items()}
        for name, instruction in body.items():
            # Loops over steps and microbatches have no kind: their time outside their instructions counts as idle.
            if instruction.opcode == "while" and "jvp(" not in work[name].path:
                continue
            kinds[name] = _kind(instruction.opcode, work[name].is_product, _paths(name, body, work))
    return kinds


def record_trace(work: Callable[[], Any], directory: str = "") -> jax.profiler.ProfileData:
    """Profile `work`, which must block until its devices are done; keep the trace if `directory` is given."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as temporary:
        with jax.profiler.trace(directory or temporary, profiler_options=options):
            work()
        files = Path(directory or temporary).rglob("*.xplane.pb")
        newest = max(files, key=lambda file: file.stat().st_mtime)
        return jax.profiler.ProfileData.from_file(str(newest))


def device_time(profile: jax.profiler.ProfileData, kind_of: Mapping[str, str], devices: int) -> dict[str, float]:
    """Compute the share of each kind of work, and of `idle`, in the device time of a program's trace.

    `kind_of` maps the name of each instruction to its kind; `devices` is the number of devices of this process. Time without
    an instruction is idle. Raises `ValueError` if the trace contains no instruction of the program.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warning of jaxlib 0.12 on reading `event.stats`
        lines = [_events(line, kind_of) for line in _lines(profile)]
    if not any(lines):
        raise ValueError("the trace contains no instruction of the program")

    times = dict.fromkeys(WORK, 0.0)
    for kind, own in itertools.chain(*map(own_times, lines)):
        times[kind] += own
    busy = sum(times.values())
    starts, ends, _ = zip(*itertools.chain(*lines), strict=True)
    whole = max(devices * (max(ends) - min(starts)), busy)
    times["idle"] = whole - busy
    return {kind: time / whole for kind, time in times.items()}


@dataclass
class _Open:
    """An event that has not ended at the present time."""

    end: float
    name: str
    own: float  # self time, without the nested events so far


def own_times(events: Iterable[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """Yield the name and the self time, without nested events, of each event `(start, end, name)` of a thread."""
    stack: list[_Open] = []  # each event is nested in its predecessor
    for start, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while stack and stack[-1].end <= start:
            ended = stack.pop()
            yield ended.name, ended.own
        if stack:
            outer = stack[-1]
            outer.own -= min(end, outer.end) - start
        stack.append(_Open(end, name, own=end - start))
    for event in stack:
        yield event.name, event.own


def _lines(profile: jax.profiler.ProfileData) -> Iterator[Any]:
    """Yield the threads or streams that run instructions, of the devices or of a host with CPU devices."""
    planes = {plane.name: list(plane.lines) for plane in profile.planes}
    # Skip devices without lines: libtpu adds such a device.
    devices = [lines for name, lines in planes.items() if name.startswith("/device:") and lines]
    for lines in devices or [planes.get("/host:CPU", [])]:
        # "XLA Ops" holds the events of all streams: reading the streams as well would count the events twice.
        yield from [line for line in lines if line.name == "XLA Ops"] or lines


def _events(line: Any, kind_of: Mapping[str, str]) -> list[tuple[float, float, str]]:
    """Return the start, the end and the kind of each instruction of a thread or stream."""
    events = []
    for event in line.events:
        name = _instruction(event, kind_of)
        if name:
            events.append((event.start_ns, event.end_ns, kind_of[name]))
    return events


def _instruction(event: Any, kind_of: Mapping[str, str]) -> str:
    """Return the name of an event's instruction; "" if `kind_of` does not contain it.

    For GPU kernels, the statistic `hlo_op` contains the name.
    """
    name = event.name.split(" = ")[0].lstrip("%")
    if name in kind_of:
        return name
    return next((value for key, value in event.stats if key == "hlo_op" and value in kind_of), "")


class _Work(NamedTuple):
    """The work of an instruction.

    Attributes:
        path: source path. A fusion has the path of its first product; without a product, its own path, or the path of its
            first instruction with a path. "": dropped by the compiler.
        is_product: whether it is a product, or contains one.
    """

    path: str
    is_product: bool


def _work_of(instruction: Instruction, computations: Mapping[str, Computation]) -> _Work:
    """Return what an instruction computes, including the instructions of a fusion or call."""
    fused = [instruction]
    if instruction.opcode in ("fusion", "call"):
        for name in instruction.called:
            fused += computations.get(name, {}).values()
    products = [each for each in fused if _is_product(each)]
    path = next((each.path for each in products or fused if each.path), "")
    return _Work(path, is_product=bool(products))


def _paths(name: str, body: Computation, work: Mapping[str, _Work]) -> list[str]:
    """Return the source paths to classify an instruction by: its own path; for a product without a path, its neighbors' paths.

    The CPU compiler splits the products of attention and drops their source paths.
    """
    if work[name].path or not work[name].is_product:
        return [work[name].path]
    with_path = {each for each in body if work[each].path}
    return [work[each].path for each in _near(name, body, with_path)]


def _is_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a product with a matrix, by the compiler or by a library."""
    if instruction.opcode == "dot":
        # The gradient of a bias, a sum over tokens, is also compiled to a dot, with a vector of ones.
        return not re.match(r"\w+\[\d+,1\]", instruction.shape)
    if instruction.opcode == "custom-call":  # a product of a library
        return "dot_general" in instruction.path or "__cublas" in instruction.rest
    return instruction.opcode == "convolution"


def _near(name: str, body: Computation, with_path: Collection[str]) -> set[str]:
    """Return an instruction, its operands and users, and the neighbors of each neighbor without a path."""
    near = {name}
    without_path = {name}
    for _ in range(NEAR):
        operands = {each for other in without_path for each in body[other].operands if each in body}
        users = {other for other, each in body.items() if not without_path.isdisjoint(each.operands)}
        without_path = (operands | users).difference(with_path) - near
        near |= operands | users
    return near


def _kind(opcode: str, is_product: bool, paths: Collection[str]) -> str:
    """Return the kind of an instruction, one of `WORK`; the first that applies, in the order of the tests.

    All operands and users of a product in the differentiated part are in that part too. So a single path outside, without
    `jvp`, shows that a product without a path belongs to the optimizer.
    """
    if opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return "communication"
    if any("/attn/" in path and "_proj" not in path for path in paths):
        return "attention"
    if any(path.startswith("jit(") and "jvp(" not in path for path in paths):
        return "optimizer"
    return "products" if is_product else "elementwise"
