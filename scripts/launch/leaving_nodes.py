"""Takes replicas off machines that are about to leave a Ray cluster, while they can still finish their requests.

Ray's autoscaler, KubeRay and `ray drain-node` give notice of a machine that goes, because it is idle or will be
preempted. Nothing new is placed there from then on, and what runs there goes on until the machine does.
"""

import asyncio
import logging
from collections.abc import Collection

import ray

from rollout.events.kinds import FleetEvent, FleetEventKind
from rollout.fleet.operator import FleetOperator
from rollout.replica.lifecycle import FleetRefusalError, Replica, ReplicaState
from rollout.replica.replica_group import ReplicaHandle
from scripts.launch.head import answers

logger = logging.getLogger(__name__)
LOOK_S = 2.0
"""The seconds between two looks at the notices."""


def leaving_nodes() -> Collection[str]:
    """Return Ray's ids of the machines that are about to go. Ray's own libraries ask in the same way; nothing that its
    documentation names tells it."""
    return ray._private.state.state.get_draining_nodes()  # pyright: ignore


async def watch_leaving_nodes(operator: FleetOperator) -> None:
    """Give each replica on such a machine a replacement, and drain it. Look until cancelled."""
    head = ray.get_runtime_context().gcs_address
    while True:
        await asyncio.sleep(LOOK_S)
        if not await answers(head):
            continue  # a question would be open for a minute, which is longer than the run has to end
        try:
            leaving = await asyncio.to_thread(leaving_nodes)
        except Exception as error:  # the head does not answer, of which the run ends if it lasts
            logger.warning("which machines are about to leave the cluster is not known: %r", error)
            continue
        for replica in list(operator.fleet.replicas.values()):
            handle = replica.handle
            if isinstance(handle, ReplicaHandle) and handle.place and handle.place.node_id in leaving:
                await take_off(operator, replica)


async def take_off(operator: FleetOperator, replica: Replica) -> None:
    """Ask for the replacement once, and drain the replica as soon as enough others serve."""
    if replica.state not in (ReplicaState.READY, ReplicaState.STALE):
        return
    if replica.successor is None:
        name = operator.fleet.want_successor(replica.name)
        text = f"{replica.name} to be replaced by {name}: {replica.node} is about to leave the cluster"
        operator.fleet.report(FleetEvent(FleetEventKind.STARTING, name, text))
    try:
        await operator.drain(replica.name)
    except FleetRefusalError as refusal:  # too few would be left: again when its replacement serves
        logger.info("%s", refusal)
