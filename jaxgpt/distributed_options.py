"""Options of the processes of a distributed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxgpt.errors import short_repr
from jaxgpt.settings import Section, setting


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """Processes of a distributed run, not saved in config.json: their number may change on resume."""

    prefix = "distributed"

    coordinator: str = setting(
        "", "HOST:PORT of process 0, auto or none; empty: auto on Slurm, Open MPI and GKE with TPUs, otherwise none"
    )
    num_processes: int = setting(0, "number of processes, if the coordinator is HOST:PORT")
    process_id: int = setting(-1, "index of this process, from 0")
    bind: str = setting("", "ADDRESS:PORT that process 0 listens on; empty: same as the coordinator")
    join_seconds: int = setting(300, "seconds to wait for the other processes at startup", 2, 86400)
    heartbeat_seconds: int = setting(30, "seconds without a heartbeat of a process before the run aborts", 2, 86400)
    launched: bool = setting(False, "set by jaxgpt launch: save and stop when standard input closes")

    def check(self) -> Iterator[str]:
        if self.coordinator in ("", "auto", "none"):
            if self.num_processes or self.process_id != -1:
                yield "distributed.num_processes and process_id need distributed.coordinator HOST:PORT: add it, or omit them"
            return
        addresses = (
            ("coordinator", self.coordinator, "HOST:PORT, auto or none"),
            ("bind", self.bind, "ADDRESS:PORT"),
        )
        for name, value, form in addresses:
            host, _, port = value.rpartition(":")
            is_address = host and port.isdecimal() and 0 < int(port) < 2**16
            if value and not is_address:
                yield f"distributed.{name} must be {form}, not {short_repr(value)}"
        if not 0 <= self.process_id < self.num_processes <= 2**20:
            limits = f"at least 0 and below distributed.num_processes {self.num_processes}"
            yield f"distributed.process_id {self.process_id} must be {limits}"
