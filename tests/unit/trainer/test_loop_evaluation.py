"""Evaluations beside the steps: which are due, what goes on meanwhile, under which version they are recorded."""

import pytest

from tests.support.loop_world import World, run


@pytest.mark.parametrize(
    ("total_steps", "eval_every", "expected"), [(6, 2, [2, 4]), (5, 2, [2, 4]), (3, 0, []), (3, 1, [1, 2]), (3, 3, [])]
)
def test_evaluation_steps_leave_the_last_to_the_caller(total_steps: int, eval_every: int, expected: list[int]) -> None:
    world = run(World(), total_steps=total_steps, eval_every=eval_every)
    assert [step for step, _ in world.evaluations] == expected


def test_with_an_interval_the_first_update_after_the_due_step_is_evaluated() -> None:
    world = run(World(), total_steps=12, interval=3, eval_every=4)
    assert [step for step, _ in world.evaluations] == [6, 9], "due at 4 and 8; at 12 it is the caller's"


def test_steps_and_updates_go_on_while_an_evaluation_lasts_and_it_is_recorded_under_the_version_it_began_with() -> None:
    world = run(World(evaluation_ends_after="record 5"), total_steps=6, eval_every=2)
    events = [event for event in world.events if event.startswith(("update", "evaluate", "record"))]
    assert events[:4] == ["update_weights 1", "record 1", "update_weights 2", "record 2"]
    assert events.index("evaluate") < events.index("update_weights 3") < events.index("update_weights 5")
    assert events.index("update_weights 5") < events.index("record_evaluation 2")
    assert [step for step, _ in world.evaluations] == [2]
    skipped = [metrics["eval/skipped"] for metrics in world.records.values()]
    assert skipped == [0, 0, 0, 0, 1, 1], "the one due at 4 would overlap"


def test_the_loops_end_waits_for_an_evaluation() -> None:
    world = run(World(evaluation_ends_after="record 3"), total_steps=3, eval_every=2)
    assert world.events[-1] == "record_evaluation 2" and list(world.records) == [1, 2, 3]


def test_an_evaluation_that_fails_ends_the_run() -> None:
    world = World(fails="evaluate")
    with pytest.raises(RuntimeError, match="evaluate broke"):
        run(world, total_steps=1000, eval_every=2)
    assert 2 <= len(world.records) < 10 and world.evaluations == []


@pytest.mark.parametrize(
    ("first_step", "is_evaluated", "expected"), [(2, False, [2, 4]), (2, True, [4]), (3, False, [4])]
)
def test_a_resumed_loop_begins_with_the_evaluation_that_its_checkpoint_still_lacks(
    first_step: int, is_evaluated: bool, expected: list[int]
) -> None:
    world = World(live=first_step)
    run(world, total_steps=6, eval_every=2, first_step=first_step, is_evaluated=is_evaluated)
    assert [step for step, _ in world.evaluations] == expected
    if expected[0] == first_step:
        assert world.events[0] == "evaluate", "it takes its replicas before the first step"


@pytest.mark.parametrize("first_step", [0, 6])
def test_what_comes_before_and_after_all_is_never_the_loops(first_step: int) -> None:
    world = run(World(), total_steps=6, eval_every=6, first_step=first_step, is_evaluated=False)
    assert world.evaluations == []
