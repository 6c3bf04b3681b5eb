"""The cost of a step on one device: memory, FLOPs and communication, and bounds on its time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from jaxgpt.parallel.chips import Chip
from jaxgpt.plan.collectives import Collective, Traffic, traffic_by_kind

# The resources of a step: FLOPs, and bytes of device memory, of the links within a slice, and of the network between slices.
Resource = Literal["compute", "memory", "links", "network"]


class Bounds(TypedDict):
    """The roofline of a step: the seconds of all resources at peak rates, overlapped (maximum) or serial (sum), and MFU."""

    seconds_overlapped: float
    seconds_serial: float
    mfu_overlapped: float
    mfu_serial: float
    seconds_least: NotRequired[float]  # lower bound on the time of a step; absent: unknown
    mfu_most: NotRequired[float]  # upper bound on the MFU of a step


@dataclass(frozen=True)
class StepCost:
    """The cost of one step on one device."""

    memory: dict[str, float]  # bytes by kind, such as parameters or activations
    available: float  # bytes of device memory; on a TPU, bytes available to a program
    model_flops: float  # model FLOPs that this device computes, without recomputation
    hbm_bytes: float  # bytes read from and written to memory
    collectives: tuple[Collective, ...] = ()  # one entry for each kind, group, axes and site (`merged`)
    computed_flops: float = 0.0  # FLOPs of all products and kernels, found by tracing; 0: unknown
    recomputed_flops: float = 0.0  # the part of computed_flops that rematerialization adds
    # Lower bounds for any program of this step: FLOPs of compute, and bytes of the other resources.
    least: dict[Resource, float] = field(default_factory=dict)
    compiled_flops: float = 0.0  # FLOPs counted by the compiler; 0 for an estimate
    compiled: bool = False  # whether the step was compiled; otherwise, its cost is estimated
    useful_share: float = 1.0  # fraction of model_flops without padding and products that other devices repeat
    loops_once: bool = False  # whether the program has loops; the compiler counts FLOPs and bytes of a loop body once
    # Whether memory is exhausted; then hbm_bytes, collectives and compiled_flops are unknown.
    out_of_memory: bool = False

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return not self.out_of_memory and self.total <= self.available

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Collectives by kind, such as all-reduce."""
        return traffic_by_kind(self.collectives)

    def seconds(self, chip: Chip) -> dict[Resource, float]:
        """Compute the seconds of each resource at peak rates."""
        work: dict[Resource, float] = {
            "compute": self.computed_flops or self.model_flops,
            "memory": self.hbm_bytes,
            "links": sum(each.sent for each in self.traffic.values()),
            "network": sum(each.sent_between_slices for each in self.traffic.values()),
        }
        rates = rates_of(chip)
        return {name: amount / rates[name] for name, amount in work.items()}

    def least_seconds(self, chip: Chip) -> dict[Resource, float]:
        """Compute lower bounds on the seconds of each resource, from `least`; a step takes at least their maximum."""
        rates = rates_of(chip)
        return {name: amount / rates[name] for name, amount in self.least.items()}

    def bounds(self, chip: Chip) -> Bounds:
        """Compute the roofline of the step.

        Source: Williams, Waterman and Patterson 2009; MFU, `useful_share * model_flops / (chip.flops * seconds)`: PaLM,
        appendix B.
        """
        seconds = self.seconds(chip).values()
        overlapped = max(seconds)
        serial = sum(seconds)
        useful = self.useful_share * self.model_flops / chip.flops  # seconds of the useful FLOPs at the peak rate
        bounds: Bounds = {
            "seconds_overlapped": overlapped,
            "seconds_serial": serial,
            "mfu_overlapped": useful / overlapped,
            "mfu_serial": useful / serial,
        }
        least = max(self.least_seconds(chip).values(), default=0.0)
        if least:
            bounds["seconds_least"] = least
            bounds["mfu_most"] = useful / least
        return bounds

    def to_json(self, chip: Chip) -> dict[str, Any]:
        """Return all numbers as JSON; with `out_of_memory`, the unknown numbers and the times are null."""
        fields_of_cost = [each.name for each in fields(StepCost) if each.name != "collectives"]
        values: dict[str, Any] = {name: getattr(self, name) for name in fields_of_cost}
        values |= {"fits": self.fits, "total": self.total}
        parts = {
            "traffic": {kind: asdict(each) for kind, each in self.traffic.items()},
            "collectives": [collective_json(each, chip) for each in self.collectives],
            "seconds": self.seconds(chip),
            "bounds": self.bounds(chip),
        }
        if not self.out_of_memory:
            return values | parts
        unknown = ("hbm_bytes", "compiled_flops", "loops_once", *parts)
        return values | dict.fromkeys(unknown)


def rates_of(chip: Chip) -> dict[Resource, float]:
    """Return the peak rate of each resource of a chip: FLOP/s of `compute`, bytes/s of the other resources."""
    return {"compute": chip.flops, "memory": chip.hbm_bandwidth, "links": chip.link, "network": chip.network}


class CollectiveSeconds(NamedTuple):
    """Seconds of all executions of a collective.

    On a torus of n dimensions, an axis of the mesh that follows one dimension has 1/n of the links of a chip. Between slices,
    and on chips behind a switch, both times are equal.

    Attributes:
        all_links: seconds with all links of a chip.
        one_dimension: seconds with the links of one torus dimension.
    """

    all_links: float
    one_dimension: float


def collective_seconds(one: Collective, chip: Chip) -> CollectiveSeconds:
    """Return the seconds of all executions of a collective."""
    sent = one.sent * one.times
    if one.between_slices:
        seconds = sent / chip.network
        return CollectiveSeconds(all_links=seconds, one_dimension=seconds)
    return CollectiveSeconds(all_links=sent / chip.link, one_dimension=chip.torus * sent / chip.link)


def collective_json(one: Collective, chip: Chip) -> dict[str, Any]:
    """Return the numbers of a collective, in bytes and seconds per step and device."""
    seconds = collective_seconds(one, chip)
    return {
        "kind": one.kind,
        "axes": list(one.axes),
        "carries": one.site,
        "count": one.times,
        "bytes": one.bytes * one.times,
        "sent": one.sent * one.times,
        "between_slices": one.between_slices,
        "seconds": seconds.all_links,
        "seconds_one_dimension": seconds.one_dimension,
    }
