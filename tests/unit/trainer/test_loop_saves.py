"""When the train loop saves."""

from tests.unit.trainer.test_loop import World, run


def test_a_checkpoint_is_of_the_moment_before_slots_are_freed_and_counts_once_the_step_is_recorded() -> None:
    world = run(World(due=(2,)))
    assert world.events[5:] == [
        "next_batch 1",
        "train_step 1",
        "update_weights 2",
        "stage 2",
        "advance 2",
        "record 2",
        "commit {'recorder': b'after record 2'}",
    ]
    assert ["timing_s/checkpoint" in metrics for metrics in world.records.values()] == [False, True]


def test_a_resumed_loop_takes_the_steps_that_are_left() -> None:
    world = run(World(), total_steps=4, first_step=2)
    assert list(world.records) == [3, 4] and world.events[0] == "next_batch 2"
