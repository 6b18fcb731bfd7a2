"""Every path of the state machine, and those that must not exist."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.fleet.lifecycle import IllegalTransitionError, Lifecycle, ReplicaState

CALLS = ("started", "sync", "verified", "miss", "drain", "die")
LEGAL = {
    ("STARTING", "started"): "SYNCING",
    ("SYNCING", "verified"): "READY",
    ("SYNCING", "miss"): "STALE",
    ("READY", "miss"): "STALE",
    ("READY", "sync"): "SYNCING",
    ("STALE", "sync"): "SYNCING",
    ("READY", "drain"): "DRAINING",
    ("STALE", "drain"): "DRAINING",
    **{(state.value, "die"): "DEAD" for state in ReplicaState if state is not ReplicaState.DEAD},
}


def call(life: Lifecycle, name: str) -> None:
    life.verified(3) if name == "verified" else getattr(life, name)()


def in_state(state: ReplicaState) -> Lifecycle:
    life = Lifecycle("replica-4")
    life.state = state
    return life


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("state", ReplicaState)
def test_every_transition_from_every_state(state: ReplicaState, name: str) -> None:
    life = in_state(state)
    if (wanted := LEGAL.get((state.value, name))) is not None:
        call(life, name)
        assert life.state.value == wanted
    else:
        with pytest.raises(IllegalTransitionError, match=rf"^replica-4 is {state.value}: cannot be \w+ by {name}\(\)"):
            call(life, name)
        assert life.state is state, "what is refused changes nothing"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(CALLS), max_size=30))
def test_no_path_leads_to_ready_without_verified_weights_and_none_out_of_death(calls: list[str]) -> None:
    life = Lifecycle("r")
    died = False
    for name in calls:
        before = life.state
        try:
            call(life, name)
        except IllegalTransitionError:
            assert life.state is before
            continue
        assert not died, "nothing happens to the dead"
        died = life.state is ReplicaState.DEAD
        if life.state is ReplicaState.READY:
            assert (name, before) == ("verified", ReplicaState.SYNCING)


def test_a_version_that_is_none_is_refused() -> None:
    life = in_state(ReplicaState.SYNCING)
    with pytest.raises(ValueError, match=re.escape("replica-4: -1 is no version of the weights; tags begin at 0")):
        life.verified(-1)
    assert life.state is ReplicaState.SYNCING
