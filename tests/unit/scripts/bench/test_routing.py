"""Which replica a prompt goes to: what it saves there counts against the load, and groups stay together."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollout.engines.virtual_clock import run_virtual
from scripts.bench.routing import GROUP, WORK, preferred, simulated

NAMES = [f"replica-{index}" for index in range(5)]
LOADS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 500), min_size=1)
SAVED = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 20_000))
TOKENS = st.floats(10, 5000)


@given(LOADS, SAVED, TOKENS)
def test_the_choice_is_in_service_and_no_other_is_better_by_both(
    loads: dict[str, int], saved: dict[str, int], trajectory_tokens: float
) -> None:
    choice = preferred(loads, saved, trajectory_tokens)
    if choice is None:
        assert not any(saved.get(name) for name in loads)
        return
    best = saved.get(choice, 0)
    for name, load in loads.items():
        assert not (saved.get(name, 0) > best and load <= loads[choice])
        assert not (saved.get(name, 0) >= best and load < loads[choice])
    assert loads[choice] <= min(loads.values()) + best / trajectory_tokens, "no further than what it saves is worth"


@given(LOADS, SAVED, TOKENS, st.integers(0, 5000), st.integers(0, 200))
def test_a_replica_that_saves_more_or_has_less_to_do_stays_the_choice(
    loads: dict[str, int], saved: dict[str, int], trajectory_tokens: float, more: int, less: int
) -> None:
    choice = preferred(loads, saved, trajectory_tokens)
    if choice is not None:
        better = saved | {choice: saved.get(choice, 0) + more}
        assert preferred(loads, better, trajectory_tokens) == choice
        assert preferred(loads | {choice: loads[choice] - less}, saved, trajectory_tokens) == choice


def test_a_group_that_stays_together_prefills_its_prompt_once() -> None:
    work = replace(WORK["agents"], turns=3, groups_per_replica=12)
    hits = {arm: run_virtual(simulated(work, arm, 4))["hits"] for arm in ("turns", "episodes", "groups", "prefixes")}
    assert hits["turns"] < hits["episodes"] < hits["groups"] == hits["prefixes"], "nobody else shares a prompt"
    answers = replace(WORK["answers"], groups_per_replica=12)
    assert run_virtual(simulated(answers, "groups", 4))["hits"] == (GROUP - 1) / GROUP
