"""Profile a training step, and attribute its device time to kinds of work."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.bench.kinds import WORK


def record_trace(work: Callable[[], Any], directory: str = "") -> jax.profiler.ProfileData:
    """Profile `work`, which must block until its devices are done.

    Args:
        work: function to profile.
        directory: directory to keep the trace in; "": delete the trace.

    Raises:
        ValueError: if the profiler writes no trace.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(directory or temporary)
        with jax.profiler.trace(place, profiler_options=options):
            work()
        files = list(place.rglob("*.xplane.pb"))  # also earlier traces in `directory`
        if not files:
            raise ValueError(f"the profiler wrote no trace to {place}")
        newest = max(files, key=lambda file: file.stat().st_mtime)
        return jax.profiler.ProfileData.from_file(str(newest))


def device_time(profile: jax.profiler.ProfileData, kind_of: Mapping[str, str], devices: int) -> dict[str, float]:
    """Compute the share of each kind of work, and of `idle`, in the device time of a program's trace.

    Time without an instruction is idle.

    Args:
        profile: trace of the program.
        kind_of: kind of each instruction of the program, keyed by the name of the instruction.
        devices: number of devices of this process.

    Raises:
        ValueError: if the trace contains no instruction of the program.
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
    begin = min(event.start for line in lines for event in line)
    end = max(event.end for line in lines for event in line)
    whole = max(devices * (end - begin), busy)
    times["idle"] = whole - busy
    return {kind: time / whole for kind, time in times.items()}


class Event(NamedTuple):
    """The execution of an instruction; times are in nanoseconds."""

    start: float
    end: float
    kind: str  # kind of work of the instruction


@dataclass
class _OpenEvent:
    """An event that has started and not yet ended."""

    event: Event
    own: float  # self time, without the nested events so far


def own_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Yield the kind and the self time, without nested events, of each event of a thread.

    An event that ends after its outer event is also nested in the events around the outer event: each time counts once.

        outermost  ===============    self times  ====         ==
        outer          =====                          ===
        event             ======                         ======
    """
    stack: list[_OpenEvent] = []  # each event starts within its predecessor
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        while stack and stack[-1].event.end <= event.start:
            ended = stack.pop()
            yield ended.event.kind, ended.own
        begin = event.start  # beginning of the part of the event outside the outer events seen so far
        for outer in reversed(stack):
            end = min(event.end, outer.event.end)
            outer.own -= max(end - begin, 0)
            begin = max(begin, end)
        stack.append(_OpenEvent(event, own=event.end - event.start))
    for remaining in stack:
        yield remaining.event.kind, remaining.own


def _lines(profile: jax.profiler.ProfileData) -> Iterator[Any]:
    """Yield the threads or streams that run instructions, of the devices or of a host with CPU devices."""
    planes = {plane.name: list(plane.lines) for plane in profile.planes}
    # Skip devices without lines: libtpu adds such a device.
    devices = [lines for name, lines in planes.items() if name.startswith("/device:") and lines]
    for lines in devices or [planes.get("/host:CPU", [])]:
        # "XLA Ops" holds the events of all streams: reading the streams as well would count the events twice.
        yield from [line for line in lines if line.name == "XLA Ops"] or lines


def _events(line: Any, kind_of: Mapping[str, str]) -> list[Event]:
    """Return the executions of instructions in a thread or stream."""
    events = []
    for event in line.events:
        name = _instruction(event, kind_of)
        if name:
            events.append(Event(event.start_ns, event.end_ns, kind_of[name]))
    return events


def _instruction(event: Any, kind_of: Mapping[str, str]) -> str:
    """Return the name of an event's instruction; "" if `kind_of` does not contain it.

    For GPU kernels, the statistic `hlo_op` contains the name.
    """
    name = event.name.split(" = ")[0].lstrip("%")
    if name in kind_of:
        return name
    return next((value for key, value in event.stats if key == "hlo_op" and value in kind_of), "")
