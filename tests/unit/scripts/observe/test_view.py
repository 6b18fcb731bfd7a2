"""The events of simulated runs change nothing, and the screens can be folded from them."""

import pytest

from rollout.events.kinds import GroupTrained, ProcessStarted, ReplicaLoad, TurnEnded, TurnStarted
from scripts.observe.slices import Lanes, VersionSlice, served_slices, version_slices
from scripts.observe.view import RunView
from tests.support.event_runs import JOB, simulated, view_of
from tests.support.happenings import at, recorded, turn
from trainer.tracking.events.kinds import KINDS, EvaluationEnded, EvaluationStarted, Resumed, StepPartEnded


def test_a_run_trains_the_same_tokens_with_and_without_events() -> None:
    events, trained, outcome = simulated()
    silent, trained_before, outcome_before = simulated(tells=False)
    assert trained.steps == trained_before.steps and len(trained.steps) == JOB.num_steps
    assert outcome == outcome_before
    assert silent == [] and len(events) > 10 * JOB.num_trajectories


def test_every_trajectory_is_there_with_its_turn_its_reward_and_its_step() -> None:
    events, trained, _ = simulated()
    view = view_of(events)
    in_steps = {group.ordinal: group for group in view.groups.values() if group.trained_step is not None}
    assert {(o, g.trained_step) for o, g in in_steps.items()} == {
        (ordinal, number) for number, rows in enumerate(trained.steps, 1) for ordinal, _, _ in rows
    }
    for group in in_steps.values():
        assert group.claimed is not None and group.ready is not None and group.trained is not None
        assert group.claimed <= group.ready <= group.trained and len(group.trajectories) == JOB.group_size
        for one in group.trajectories.values():
            [its_turn] = one.turns
            assert its_turn.end is not None and its_turn.first_token is not None and one.episode_span is not None
            assert group.claimed <= its_turn.start < its_turn.first_token <= its_turn.end <= group.ready
            assert one.reward_span is not None and one.reward_span.end is not None and one.reward == 0.0
    of_turns = sorted(t.borders for g in in_steps.values() for one in g.trajectories.values() for t in one.turns)
    spans = [spans for rows in trained.steps for _, _, spans in rows]
    assert of_turns == sorted(tuple((span.start, span.global_steps) for span in some) for some in spans)
    assert any(len(borders) > 1 for borders in of_turns)  # a trajectory of two versions


def test_every_step_and_update_is_whole() -> None:
    view = view_of(simulated()[0])
    for number in range(1, JOB.num_steps + 1):
        step = view.steps[number]
        assert {"wait", "assemble", "train", "update"} == {name for name, _ in step.parts}
        assert all(span.end is not None for _, span in step.parts) and len(step.ordinals) == JOB.prompts_per_step
        for replica in ("replica-0", "replica-1"):
            update = view.updates[replica][number]
            times = [update.stage_started, update.stage_ended, update.held, update.frozen]
            times += [update.swapped, update.verified, update.resumed]
            assert None not in times and times == sorted(times, key=lambda time: time or 0.0)
            assert update.pause_s == pytest.approx(JOB.swap_s)
    assert all(load.load.kv_usage is None and load.load.running >= 0 for load in view.loads["replica-0"])
    assert len(view.loads["replica-0"]) >= 2


def test_events_of_a_process_are_in_the_order_of_time() -> None:
    events, _, _ = simulated()
    for who in {stamped.who for stamped in events}:
        times = [stamped.time for stamped in events if stamped.who == who]
        assert times == sorted(times)
    kinds = {type(stamped.event) for stamped in events}
    assert {TurnStarted, TurnEnded, GroupTrained, ReplicaLoad, StepPartEnded} <= kinds <= set(KINDS.values())


def test_a_resume_takes_back_steps_and_what_they_trained() -> None:
    trained = [at(step, GroupTrained(global_steps=step, ordinal=step)) for step in (1, 2)]
    view = view_of([recorded(1), recorded(2), *trained, at(9, Resumed(global_steps=1))])
    assert set(view.steps) == {1}
    assert [view.groups[ordinal].trained_step for ordinal in (1, 2)] == [1, None]


def test_a_process_in_the_place_of_another_is_the_one_that_is_shown() -> None:
    first, second = (
        ProcessStarted(process="trainer-0", host=f"node{i}", address=f"10.77.0.{i}", pid=i) for i in (1, 2)
    )
    assert view_of([at(1, first), at(2, second)]).processes == {"trainer-0": (2, second)}


def test_an_evaluation_that_updates_overtook_is_one_of_the_version_that_answered() -> None:
    view = RunView()
    for time, version, answered in ((1.0, 10, 10), (4.0, 20, 21)):
        ended = EvaluationEnded(global_steps=answered, accuracy=0.5, pinned=False, file=f"{answered}")
        view.add(at(time, EvaluationStarted(global_steps=version)))
        view.add(at(time + 2, ended))
    view.add(at(9.0, EvaluationStarted(global_steps=30)))
    found = {version: (one.start, one.end, one.global_steps) for version, one in view.evaluations.items()}
    assert found == {10: (1.0, 3.0, 10), 21: (4.0, 6.0, 21), 30: (9.0, None, 30)}


def test_a_turn_is_cut_where_its_replica_swapped() -> None:
    cut = version_slices(0.0, 9.0, [(0, 4), (12, 5)], [(3.0, 5), (20.0, 6)])
    assert cut == [VersionSlice(0.0, 3.0, 4), VersionSlice(3.0, 9.0, 5)]
    assert version_slices(0.0, 9.0, [(0, 4), (12, 5)], []) == [VersionSlice(0.0, 9.0, 5)]
    assert version_slices(0.0, 9.0, [], [(3.0, 5)]) == []


def test_a_turn_that_goes_on_has_the_versions_that_its_replica_served_meanwhile() -> None:
    swaps = [(3.0, 5), (1.0, 4), (20.0, 6)]
    assert served_slices(2.0, 9.0, swaps) == [VersionSlice(2.0, 3.0, 4), VersionSlice(3.0, 9.0, 5)]
    assert served_slices(0.5, 2.0, swaps) == [VersionSlice(1.0, 2.0, 4)], "of what was before nobody knows"
    assert served_slices(4.0, 30.0, swaps) == [VersionSlice(4.0, 20.0, 5), VersionSlice(20.0, 30.0, 6)]
    assert served_slices(0.0, 0.5, swaps) == [] == served_slices(0.0, 9.0, [])


def test_what_runs_at_the_same_time_has_lanes_of_its_own() -> None:
    lanes = Lanes()
    assert [lanes.take(*span) for span in [(0, 5), (4, 6), (3, 9)]] == [0, 1, 2]
    assert [lanes.take(*span) for span in [(6, 8), (5, 6), (4, 5)]] == [0, 0, 3] and len(lanes) == 4
    lanes.forget(7)
    assert lanes.take(0, 2) == 0


def test_a_turn_that_goes_on_has_no_end() -> None:
    view = RunView()
    view.add(turn(0, 1.0, 2.0, [(0, 1)], "replica-0")[0])
    [open_turn] = view.groups[0].trajectories[0].turns
    assert (open_turn.start, open_turn.end, open_turn.replica) == (1.0, None, "replica-0")
