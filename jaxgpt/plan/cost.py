"""The cost of a step on one device: memory, FLOPs and communication, and lower bounds on its time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from jaxgpt.parallel.chips import Chip
from jaxgpt.plan.hlo import Collective


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step, per device."""

    count: int = 0
    bytes: float = 0.0  # bytes of the results
    sent: float = 0.0  # bytes to devices of the same slice
    sent_between_slices: float = 0.0  # bytes to other slices


@dataclass(frozen=True)
class StepCost:
    """The cost of one step on one device."""

    memory: dict[str, float]  # bytes by kind, such as parameters or activations
    available: float  # bytes of device memory; on a TPU, bytes available to a program
    model_flops: float  # model FLOPs that this device computes, without recomputation
    hbm_bytes: float  # bytes read from and written to memory
    traffic: dict[str, Traffic]  # collectives by kind, such as all-reduce
    compiled_flops: float = 0.0  # FLOPs counted by the compiler; 0 for an estimate
    compiled: bool = False  # whether the step was compiled; otherwise, its cost is estimated
    useful_share: float = 1.0  # fraction of model_flops without padding and products that other devices repeat
    loops_once: bool = False  # whether the program has loops; the compiler counts FLOPs and bytes of a loop body once
    out_of_memory: bool = False  # whether memory is exhausted; then hbm_bytes, traffic and compiled_flops are unknown

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return not self.out_of_memory and self.total <= self.available

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Compute lower bounds, in seconds, on compute, memory, link and network time at peak rates."""
        return {
            "compute": self.model_flops / chip.flops,
            "memory": self.hbm_bytes / chip.hbm_bandwidth,
            "links": sum(t.sent for t in self.traffic.values()) / chip.link,
            "network": sum(t.sent_between_slices for t in self.traffic.values()) / chip.network,
        }

    def bounds(self, chip: Chip) -> dict[str, float]:
        """Compute the roofline: maximum (overlapped) and sum (serial) of lower bounds in seconds, and MFU.

        Source: Williams, Waterman and Patterson 2009; MFU, `useful_share * model_flops / (chip.flops * seconds)`: PaLM,
        appendix B.
        """
        seconds = self.seconds(chip)
        overlapped = max(seconds.values())
        serial = sum(seconds.values())
        return {
            "seconds_overlapped": overlapped,
            "seconds_serial": serial,
            "mfu_overlapped": self.useful_share * seconds["compute"] / overlapped,
            "mfu_serial": self.useful_share * seconds["compute"] / serial,
        }

    def to_json(self, chip: Chip) -> dict[str, Any]:
        """Return all numbers as JSON; with `out_of_memory`, the unknown numbers and the times are null."""
        times = {"seconds": self.seconds(chip), "bounds": self.bounds(chip)}
        values = asdict(self) | {"fits": self.fits, "total": self.total} | times
        if not self.out_of_memory:
            return values
        unknown = ("hbm_bytes", "traffic", "compiled_flops", "loops_once", *times)
        return values | dict.fromkeys(unknown)


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
