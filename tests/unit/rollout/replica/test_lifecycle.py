"""Every path of the state machine, and those that must not exist."""

import pytest

from rollout.replica.lifecycle import CANNOT_DRAIN, FROM, FleetRefusalError, Replica, ReplicaState

LEGAL = {
    ("STARTING", "SYNCING"),
    ("SYNCING", "READY"),
    ("SYNCING", "STALE"),
    ("READY", "STALE"),
    ("READY", "SYNCING"),
    ("STALE", "SYNCING"),
    ("READY", "DRAINING"),
    ("STALE", "DRAINING"),
    *((state.value, "DEAD") for state in ReplicaState if state is not ReplicaState.DEAD),
}


@pytest.mark.parametrize("to", ReplicaState)
@pytest.mark.parametrize("state", ReplicaState)
def test_every_transition_from_every_state(state: ReplicaState, to: ReplicaState) -> None:
    life = Replica(name="replica-4", state=state)
    if (state.value, to.value) in LEGAL:
        life.enter(to)
        assert life.state is to
    else:
        with pytest.raises(FleetRefusalError, match=f"^replica-4 is {state.value}: cannot be {to.value}"):
            life.enter(to)
        assert life.state is state, "what is refused changes nothing"


def test_an_operator_is_told_of_every_state_why_it_cannot_drain() -> None:
    assert set(CANNOT_DRAIN) == set(ReplicaState) - set(FROM[ReplicaState.DRAINING])
