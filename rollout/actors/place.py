"""The place of a process: the machine that it runs on."""

import os
import socket
from dataclasses import dataclass

import ray

from configs.runtime.network import ADDRESS
from rollout.events.kinds import ProcessStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The machine and the number of a process.

    Example: str(place) == "on node3 (10.77.0.3), process 4711"
    """

    node_id: str
    """Ray's id of the machine: two may have one name."""
    host: str
    address: str
    """The address by which other machines reach it."""
    pid: int

    def __str__(self) -> str:
        return f"on {self.host} ({self.address}), process {self.pid}"

    def started(self, process: str) -> ProcessStarted:
        """Return the event that the process of this name runs here."""
        return ProcessStarted(process=process, host=self.host, address=self.address, pid=self.pid)


def own_place() -> Place:
    """Return the place of this process, which is connected to Ray."""
    return Place(
        node_id=ray.get_runtime_context().get_node_id(),
        host=socket.gethostname(),
        address=os.environ.get(ADDRESS) or ray.util.get_node_ip_address(),
        pid=os.getpid(),
    )
