"""The states of one replica, and the only ways between them."""

from enum import Enum


class ReplicaState(Enum):
    STARTING = "STARTING"
    """Its process is being placed and its engine loads."""
    SYNCING = "SYNCING"
    """Its engine runs, on weights that nobody has verified."""
    READY = "READY"
    """It serves weights that were verified. The only state in which anything is routed to it."""
    DRAINING = "DRAINING"
    """It finishes what it has, and then ends."""
    STALE = "STALE"
    """It goes on with what it has, on whole weights that are not current."""
    DEAD = "DEAD"
    """It was ended, or has ended itself. For good: what replaces it is another replica with a name of its own."""


FROM = {
    "started": (ReplicaState.STARTING,),
    "sync": (ReplicaState.STALE, ReplicaState.READY),
    "verified": (ReplicaState.SYNCING,),
    "miss": (ReplicaState.SYNCING, ReplicaState.READY),
    "drain": (ReplicaState.READY, ReplicaState.STALE),
    "die": tuple(state for state in ReplicaState if state is not ReplicaState.DEAD),
}
"""Transition -> the states in which it is allowed."""


class IllegalTransitionError(RuntimeError):
    """The message names the replica, its state and what was wanted of it."""


class Lifecycle:
    """STARTING -started-> SYNCING -verified-> READY -drain-> DRAINING -die-> DEAD

    An update takes READY or STALE through `sync`, SYNCING and `verified`; READY and SYNCING become STALE by a `miss`;
    STALE may drain too; everything can die. Every transition raises IllegalTransitionError from any other state.
    """

    def __init__(self, name: str):
        self.name = name
        self.state = ReplicaState.STARTING
        self.global_steps = -1
        """Tag of the weights that were last verified; -1 before any were."""

    def started(self) -> None:
        """The engine runs."""
        self._go("started", ReplicaState.SYNCING)

    def sync(self) -> None:
        """Other weights than those it was verified with."""
        self._go("sync", ReplicaState.SYNCING)

    def verified(self, global_steps: int) -> None:
        """Every worker holds exactly the weights that were published with this tag."""
        if global_steps < 0:
            raise ValueError(f"{self.name}: {global_steps} is no version of the weights; tags begin at 0")
        self._go("verified", ReplicaState.READY)
        self.global_steps = global_steps

    def miss(self) -> None:
        """It did not get an update, or is kept from it."""
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
