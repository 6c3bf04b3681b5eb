"""Collectives of a step: kind, bytes, devices and number of executions of each, and their sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """A collective of a program."""

    kind: str  # one of `COLLECTIVES`
    bytes: float  # bytes of the result per device
    group: int  # number of participating devices; between slices, number of slices
    times: int = 1  # number of executions
    between_slices: bool = False  # whether the network between slices is used, not the links within a slice
    axes: tuple[str, ...] = ()  # axes of the mesh along which the devices of a group differ; (): unknown
    site: str = ""  # name of the data, or place in the source, such as `h/attn/q_proj`
    avoidable: int = 0  # in estimates, number of these executions that a program may avoid

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


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Join the collectives of equal kind, group, axes, site and network, and sort them by the bytes sent, largest first.

    The bytes of joined collectives are their mean per execution.
    """
    found: dict[tuple[object, ...], Collective] = {}
    for one in collectives:
        key = (one.kind, one.group, one.axes, one.site, one.between_slices)
        old = found.get(key)
        if old is None:
            found[key] = one
            continue
        times = old.times + one.times
        mean = (old.bytes * old.times + one.bytes * one.times) / times
        found[key] = one._replace(times=times, bytes=mean, avoidable=old.avoidable + one.avoidable)
    return tuple(sorted(found.values(), key=lambda one: -one.sent * one.times))


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step, per device."""

    count: int = 0
    bytes: float = 0.0  # bytes of the results
    sent: float = 0.0  # bytes to devices of the same slice
    sent_between_slices: float = 0.0  # bytes to other slices


def traffic_by_kind(collectives: Iterable[Collective]) -> dict[str, Traffic]:
    """Sum the collectives of each kind."""
    traffic: dict[str, Traffic] = {}
    for one in collectives:
        old = traffic.get(one.kind, Traffic())
        sent = one.sent * one.times
        traffic[one.kind] = Traffic(
            count=old.count + one.times,
            bytes=old.bytes + one.bytes * one.times,
            sent=old.sent + (0.0 if one.between_slices else sent),
            sent_between_slices=old.sent_between_slices + (sent if one.between_slices else 0.0),
        )
    return traffic
