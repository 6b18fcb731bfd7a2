"""Errors that are raised in one part of the rollouts and handled in another."""


class ReplicaLostError(RuntimeError):
    """A replica was lost while it generated. The message names it."""


class AgentWorkerLostError(RuntimeError):
    """The process that ran a group's agent loop died. Another process replaces it."""


class EpisodesLostError(RuntimeError):
    """The episodes of a group have waited for another replica for too long, and are ended. The group begins anew; with
    sessions.replayable=false nothing that was sampled for it is heard again."""


class NoTokensError(RuntimeError):
    """The policy has sampled nothing in a whole group or evaluation."""


class OtherRewardError(RuntimeError):
    """A reward belongs to another response than the one that would be trained with it."""


class NoReplicaLeftError(RuntimeError):
    """Every replica has been removed. The message names each with its error."""


class FleetPauseError(RuntimeError):
    """Some replicas could not be paused, resumed or asked. `errors`: replica -> why."""

    def __init__(self, what: str, errors: dict[str, BaseException]):
        super().__init__(f"{what} failed on " + "; ".join(f"{name}: {error!r}" for name, error in errors.items()))
        self.what = what
        self.errors = errors

    def __reduce__(self) -> tuple[type["FleetPauseError"], tuple[str, dict[str, BaseException]]]:
        return FleetPauseError, (self.what, self.errors)


class TooFewReplicasError(RuntimeError):
    """Fewer replicas are left than rollout.min_replicas, or teacher.min_replicas. The message names the loss that was
    one too many."""


class PauseConflictError(RuntimeError):
    """A pause or resume that the present state or another order does not allow. The message says which."""
