"""The states of one replica, and the allowed transitions between them."""

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
    "started": (ReplicaState.STARTING,),
    "sync": (ReplicaState.STALE, ReplicaState.READY),
    "verified": (ReplicaState.SYNCING,),
    "miss": (ReplicaState.SYNCING, ReplicaState.READY),
    "drain": (ReplicaState.READY, ReplicaState.STALE),
    "die": tuple(state for state in ReplicaState if state is not ReplicaState.DEAD),
}
"""Transition -> states in which it is allowed."""


class IllegalTransitionError(RuntimeError):
    """The message names the replica, its state and the transition that was asked of it."""


class Lifecycle:
    """State machine of one replica. Every method raises IllegalTransitionError where `FROM` does not allow it.

    Example:
        STARTING -started-> SYNCING -verified-> READY -drain-> DRAINING -die-> DEAD
        READY -miss-> STALE -sync-> SYNCING -verified-> READY
    """

    def __init__(self, name: str):
        self.name = name
        self.state = ReplicaState.STARTING
        self.global_steps = -1
        """Tag of the weights that were verified last; -1 before the first."""

    def started(self) -> None:
        """The engine runs."""
        self._go("started", ReplicaState.SYNCING)

    def sync(self) -> None:
        """The replica takes other weights than those it was verified with."""
        self._go("sync", ReplicaState.SYNCING)

    def verified(self, global_steps: int) -> None:
        """Every worker of the replica holds exactly the weights that were published with this tag."""
        if global_steps < 0:
            raise ValueError(f"{self.name}: {global_steps} is no version of the weights; tags begin at 0")
        self._go("verified", ReplicaState.READY)
        self.global_steps = global_steps

    def miss(self) -> None:
        """The replica did not get an update, or is kept from it."""
        self._go("miss", ReplicaState.STALE)

    def drain(self) -> None:
        self._go("drain", ReplicaState.DRAINING)

    def die(self) -> None:
        self._go("die", ReplicaState.DEAD)

    def _go(self, transition: str, state: ReplicaState) -> None:
        if self.state not in FROM[transition]:
            allowed = " or ".join(allowed.value for allowed in FROM[transition])
            raise IllegalTransitionError(
                f"{self.name} is {self.state.value}: cannot be {state.value} by {transition}(), which is from {allowed}"
            )
        self.state = state
