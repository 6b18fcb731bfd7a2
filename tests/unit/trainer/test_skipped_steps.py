"""Steps that NaN or infinity would break: what the loop does, what is kept, and when it is too much."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.loop_world import World, run
from tests.support.reference import make_group, make_trajectory
from tests.unit.trainer.tracking.test_recorder import Screen, example_advantages, example_groups
from trainer.tracking.bad_batches import SkippedStepsError, broken_rollouts, not_finite
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import Tracker


def test_a_skipped_step_is_recorded_its_version_goes_live_and_the_next_is_taken() -> None:
    world = run(World(broken_steps=(1,)), total_steps=3)
    assert world.events[5:11] == [
        "next_batch 1",
        "train_step 1",
        "record_skipped 2",
        "update_weights 2",
        "advance 2",
        "record 2",
    ]
    assert list(world.records) == [1, 2, 3]
    assert [metrics["actor/skipped_steps"] for metrics in world.records.values()] == [0, 1, 0], "of the step"


def test_broken_rollout_logprobs_are_found_before_the_step_which_no_worker_takes() -> None:
    world = run(World(broken_rollouts=(1,)), total_steps=3)
    assert world.events[5:11] == [
        "next_batch 1",
        "skip_step 1",
        "record_skipped 2",
        "update_weights 2",
        "advance 2",
        "record 2",
    ]
    assert world.recorded_advantages[1] == [[0.0] * 4] * 2


def test_past_the_budget_the_run_ends_and_names_step_reason_and_batch() -> None:
    world = World(broken_steps=(0, 3), broken_rollouts=(2,))
    with pytest.raises(SkippedStepsError) as raised:
        run(world, total_steps=9, max_skipped_steps=2)
    assert str(raised.value) == (
        "3 steps were skipped, trainer.max_skipped_steps=2; "
        "step 4, not finite: actor/pg_loss=nan, actor/grad_norm=inf, prompts [6, 7]"
    )
    assert list(world.records) == [1, 2, 3] and world.events[-1] == "record_skipped 4"


def test_a_budget_of_none_ends_the_run_at_the_first() -> None:
    with pytest.raises(SkippedStepsError, match=r"prompts \[2, 3\]"):
        run(World(broken_rollouts=(1,)), total_steps=9, max_skipped_steps=0)


def test_broken_rollouts_are_named_by_replica_prompt_and_place() -> None:
    fine = make_trajectory([1], [2, 3], rollout_logprobs=[-1.0, -math.inf], loss_mask=[True, False])
    minus, nan = (make_trajectory([1], [2, 3], rollout_logprobs=[-1.0, value]) for value in (-math.inf, math.nan))
    assert broken_rollouts([make_group(7, [fine, fine])]) is None, "what the policy did not sample does not count"
    assert broken_rollouts([make_group(7, [fine, minus]), make_group(8, [nan, fine])]) == (
        "rollout logprobs are not finite: replica-0, prompt 7, trajectory 1; replica-0, prompt 8, trajectory 0"
    )


def test_what_broke_is_named_by_its_metrics() -> None:
    assert not_finite({"a": 1.0, "b": -math.inf, "c": math.nan}) == "not finite: b=-inf, c=nan"
    assert not_finite({"a": 1.0}) == "not finite: logprobs"


def test_the_batch_is_kept_so_that_numpy_reads_it(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, Tracker([]), Screen())
    for count in (1, 2):
        skipped, sentence = recorder.record_skipped_step(
            12, "not finite: b=nan", example_groups(), example_advantages()
        )
        assert skipped == count
    path = tmp_path / "bad_batches" / "step_000012.npz"
    assert sentence == f"step 12 was skipped, not finite: b=nan; its batch is {path}, prompts 30, 31"
    batch = np.load(path)  # the documented line
    assert {name: batch[name].tolist() for name in batch if name != "advantages"} == {
        "ordinals": [30, 30, 31, 31],
        "replicas": ["replica-0"] * 4,
        "rewards": [1, 0, 1, 1],
        "prompt_lengths": [3, 3, 1, 1],
        "response_lengths": [4, 2, 2, 2],
        "prompt_ids": [1, 2, 3, 1, 2, 3, 1, 1],
        "response_ids": [7, 8, 9, 10, 7, 8, 9, 9, 9, 9],
        "loss_mask": [False] + [True] * 9,
        "rollout_logprobs": [0] * 10,
        "versions": [2, 4, 5, 5, 5, 5, 6, 6, 6, 6],
    }
    assert batch["advantages"].tolist() == pytest.approx([0.7, -0.7, 0, 0])


def test_a_batch_that_cannot_be_kept_is_skipped_nevertheless_and_counted(tmp_path: Path) -> None:
    (tmp_path / "bad_batches").write_text("a file in the place of the folder")
    tracker = Tracker([])
    recorder = RunRecorder(tmp_path, tracker, Screen())
    assert recorder.record_skipped_step(1, "", example_groups(), example_advantages())[0] == 1
    assert tracker.failed.counts == {"bad_batches": 1}
