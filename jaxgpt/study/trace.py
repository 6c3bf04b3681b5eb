"""Where the time of a program goes: the profiler's events, each put down to what its instruction is for."""

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
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")


class Spent(NamedTuple):
    """Device time between the first and the last instruction of a trace.

    Attributes:
        seconds: of all devices together, for each of `KINDS` and `idle`.
        span: wall-clock seconds.
    """

    seconds: dict[str, float]
    span: float

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the devices' time; together 1."""
        whole = sum(self.seconds.values())
        return {kind: seconds / whole for kind, seconds in self.seconds.items()}


def kinds(program: str) -> dict[str, str]:
    """For every instruction of a compiled training step (`compiled.as_text()`), which of `KINDS` it is.

    A fusion is what its product is for, if it has one, else what its first named part is for. What is differentiated
    carries `jvp` in its path; what is not comes after the gradient.
    """
    bodies, _ = split_computations(program)
    found = {}
    for body in bodies.values():
        parts = {part.name: part for line in body if (part := _read(line, bodies)) and not _is_loop_of_steps(part)}
        for part in parts.values():
            # The compiler for CPUs takes the products of attention apart, and forgets where they came from.
            near = [part.path] if part.path or not part.product else _paths_around(part, parts)
            found[part.name] = _kind(part, near)
    return found


def traced(work: Callable[[], Any]) -> jax.profiler.ProfileData:
    """What the profiler saw while `work` was done, which has to wait for its devices."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        return jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))


def spent(profile: jax.profiler.ProfileData, kind_of: Mapping[str, str], devices: int) -> Spent:
    """The time of a trace by kind.

    Args:
        profile: of nothing but the program.
        kind_of: for every instruction of the program its kind.
        devices: how many there are in this process. On a CPU they share the threads, so what is not work is idle.

    Raises:
        ValueError: no instruction of the program is in the trace.
    """
    times: dict[str, float] = defaultdict(float, dict.fromkeys(KINDS, 0.0))
    first, last = float("inf"), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib 0.12's own type of what events know
        for line in _lines(profile):
            events = [(e.start_ns, e.end_ns, name) for e in line.events if (name := _instruction(e, kind_of))]
            for start, end, _ in events:
                first, last = min(first, start), max(last, end)
            for name, own in own_times(events):
                times[kind_of[name]] += own * 1e-9
    if not last:
        raise ValueError("the profiler saw no instruction of the program")
    span = (last - first) * 1e-9
    return Spent(dict(times) | {"idle": max(devices * span - sum(times.values()), 0.0)}, span)


def own_times(events: Iterable[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """How long each event of one thread, (start, end, name), took without those within it."""
    open_events: list[list[Any]] = []  # end, name, own time; each within the one before
    for start, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][0] <= start:
            yield (done := open_events.pop())[1], done[2]
        if open_events:
            open_events[-1][2] -= min(end, open_events[-1][0]) - start
        open_events.append([end, name, end - start])
    yield from ((name, own) for _, name, own in open_events)


def _lines(profile: jax.profiler.ProfileData) -> Iterator[Any]:
    """The threads or streams on which instructions run; on a CPU they are the host's own."""
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or [plane for plane in planes if plane.name == "/host:CPU"]:
        lines = list(plane.lines)
        # Where the profiler has put the streams together by instruction, each would count twice.
        yield from [line for line in lines if line.name == "XLA Ops"] or lines


def _instruction(event: Any, kind_of: Mapping[str, str]) -> str:
    """The name of an event's instruction, "" if it has none. A kernel of a GPU knows it, too."""
    name = event.name.split(" = ")[0].lstrip("%")
    if name in kind_of or "::" in name:
        return name if name in kind_of else ""
    return next((value for key, value in event.stats if key == "hlo_op" and value in kind_of), "")


class _Part(NamedTuple):
    name: str
    op: str
    operands: list[str]
    path: str  # `jit(train_step)/jvp(GPT)/.../h_0/attn/q_proj/dot_general`: where in the source it comes from
    product: bool


def _read(line: str, bodies: Mapping[str, list[str]]) -> _Part | None:
    """An instruction; a fusion or call with the path of its product, or of the first of its parts that has one."""
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
    """The paths of what an instruction uses and what uses it, and of what lies behind those that have none."""
    paths, seen, waiting = [], {part.name}, [(part, 0)]
    while waiting:
        here, steps = waiting.pop(0)
        around = [parts[name] for name in here.operands if name in parts]
        around += [other for other in parts.values() if here.name in other.operands]
        for other in around:
            if other.name not in seen:
                seen.add(other.name)
                paths.append(other.path)
                waiting += [(other, steps + 1)] if not other.path and steps < 2 else []
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
    """What it takes beside its instructions is nobody's work."""
    return part.op == "while" and "jvp(" not in part.path


def _is_product(line: str) -> bool:
    instruction = _INSTRUCTION.match(line)
    op = instruction["op"] if instruction else ""
    return op in PRODUCTS or (op == "custom-call" and "dot_general" in _path(line))


def _path(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""
