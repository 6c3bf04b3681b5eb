"""What is known of one step on one device, and the least time that it can take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from jaxgpt.plan.hlo import Collective
from jaxgpt.plan.topology import Chip


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step, as each device takes part.

    Attributes:
        count: how many.
        bytes: of their results.
        sent: bytes that leave the device for its neighbours.
        sent_between_slices: bytes that leave the device for another slice.
    """

    count: int = 0
    bytes: float = 0.0
    sent: float = 0.0
    sent_between_slices: float = 0.0


@dataclass(frozen=True)
class Figures:
    """One step on one device.

    Attributes:
        memory: bytes by kind.
        available: bytes that there are.
        model_flops: by the formula for the model (nothing recomputed).
        compiled_flops: counted by the compiler, loop bodies once; 0 where there was none.
        hbm_bytes: to and from memory.
        traffic: collectives by kind.
        compiled: whether a compiler said so; else it is an estimate.
        useful: share of the windows that are not padding.
        loops_once: whether there are loops of which compiled_flops and hbm_bytes hold the body once.
    """

    memory: dict[str, float]
    available: float
    model_flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]
    compiled_flops: float = 0.0
    compiled: bool = False
    useful: float = 1.0
    loops_once: bool = False

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.available

    def seconds(self, chip: Chip) -> dict[str, float]:
        """At best, each on its own: products at their peak, memory and links at full bandwidth."""
        return {
            "compute": self.model_flops / chip.flops,
            "memory": self.hbm_bytes / chip.hbm_bandwidth,
            "links": sum(t.sent for t in self.traffic.values()) / chip.link,
            "network": sum(t.sent_between_slices for t in self.traffic.values()) / chip.network,
        }

    def bounds(self, chip: Chip) -> dict[str, float]:
        """The roofline: all four at once (`max`), one after the other (`sum`), and the utilization that each leaves.

        Source: Williams, Waterman and Patterson 2009. Utilization: `model_flops / (peak seconds)` (PaLM, appendix B).
        """
        seconds = self.seconds(chip)
        most, least = max(seconds.values()), sum(seconds.values())
        return {
            "seconds_overlapped": most,
            "seconds_serial": least,
            "mfu_overlapped": self.useful * seconds["compute"] / most,
            "mfu_serial": self.useful * seconds["compute"] / least,
        }

    def to_json(self, chip: Chip) -> dict[str, Any]:
        return (
            asdict(self)
            | {"fits": self.fits, "total": self.total, "seconds": self.seconds(chip)}
            | {"bounds": self.bounds(chip)}
        )


def summed(collectives: Iterable[Collective]) -> dict[str, Traffic]:
    """Collectives by kind."""
    traffic: dict[str, Traffic] = {}
    for one in collectives:
        old, sent = traffic.get(one.kind, Traffic()), one.sent * one.times
        traffic[one.kind] = Traffic(
            old.count + one.times,
            old.bytes + one.bytes * one.times,
            old.sent + (0.0 if one.between_slices else sent),
            old.sent_between_slices + (sent if one.between_slices else 0.0),
        )
    return traffic
