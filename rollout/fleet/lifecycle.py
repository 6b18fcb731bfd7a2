"""The states of one replica, and the allowed transitions between them."""

from dataclasses import dataclass
from enum import Enum


class ReplicaState(Enum):
    STARTING = "STARTING"
    """Its process is being placed and its engine loads."""
    SYNCING = "SYNCING"
    """Its engine runs, on weights that are not verified."""
    READY = "READY"
    """It serves verified weights. The router chooses replicas in this state only."""
    DRAINING = "DRAINING"
    """It finishes its requests, and then ends."""
    STALE = "STALE"
    """It finishes its requests on complete weights that are not current. The next update may bring it back."""
    DEAD = "DEAD"
    """It has ended, for good. A replacement is another replica with a name of its own."""


FROM = {
    ReplicaState.STARTING: (),
    ReplicaState.SYNCING: (ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.READY),
    ReplicaState.READY: (ReplicaState.SYNCING,),
    ReplicaState.STALE: (ReplicaState.SYNCING, ReplicaState.READY),
    ReplicaState.DRAINING: (ReplicaState.READY, ReplicaState.STALE),
    ReplicaState.DEAD: tuple(state for state in ReplicaState if state is not ReplicaState.DEAD),
}
"""State -> states from which a replica may enter it."""
ENDED = "it has ended already"
CANNOT_DRAIN = {
    ReplicaState.STARTING: "it is still starting; remove it, or drain it once it is READY",
    ReplicaState.SYNCING: "it is still taking its weights; remove it, or drain it once it is READY",
    ReplicaState.DRAINING: "it is draining already",
    ReplicaState.DEAD: ENDED,
}
"""Why an operator cannot drain a replica in this state."""


class FleetRefusalError(RuntimeError):
    """A replica cannot change its state, or not without leaving too few. The message says what is allowed."""


@dataclass(slots=True)
class Lifecycle:
    """State machine of one replica. Example: STARTING -> SYNCING -> READY -> STALE -> SYNCING -> READY"""

    name: str
    state: ReplicaState = ReplicaState.STARTING
    global_steps: int = -1
    """Tag of the weights that were verified last; -1 before the first."""

    def enter(self, state: ReplicaState) -> None:
        """Raises FleetRefusalError where `FROM` does not allow it."""
        if self.state not in FROM[state]:
            allowed = " or ".join(allowed.value for allowed in FROM[state])
            raise FleetRefusalError(
                f"{self.name} is {self.state.value}: cannot be {state.value}, which only {allowed} can become"
            )
        self.state = state

    def verified(self, global_steps: int) -> None:
        """Enter READY: every worker of the replica holds exactly the weights that were published with this tag."""
        self.enter(ReplicaState.READY)
        self.global_steps = global_steps
