"""TrainLoop on fakes that write down what they are asked: order, intervals, errors, metrics."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from configs.algorithm import Proximal
from configs.schema import AlgorithmConfig
from rollout.types import FloatArray
from tests.support.demonstrations import random_demonstrations
from tests.support.loop_world import World, run
from trainer.advantages.estimators import ScoredGroup
from trainer.loop import SkippedStepsError
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tokens import demonstration_tokens


def test_a_step_begins_once_the_weights_before_it_are_published_and_its_own_are_once_those_are_live() -> None:
    assert run(World(update_ends_after={1: "train_step 1"})).events == [
        "next_batch 0",
        "train_step 0",
        "publish 1",
        "next_batch 1",
        "train_step 1",
        "live 1",
        "advance 1",
        "record 1",
        "publish 2",
        "live 2",
        "advance 2",
        "record 2",
    ]


@dataclass
class Compared:
    """The comparison of replicas with the trainer, of version 2."""

    world: World

    async def remember(self, global_steps: int) -> None:
        assert self.world.publishing.locked(), "the weights may change or be read meanwhile"
        if global_steps == 2:
            await self.world.happen(f"remember {global_steps}")

    async def ask(self, global_steps: int) -> None:
        if global_steps == 2:
            await self.world.happen(f"ask {global_steps}")
            while self.world.update_ends_after.get(-2) not in (None, *self.world.events):
                await asyncio.sleep(0)
            self.world.events.append("compared")

    def gauges(self) -> dict[str, float]:
        return {"weight_sync/logprob_diff": 1e-6} if "compared" in self.world.events else {}


def test_replicas_are_compared_with_what_the_trainer_had_beside_the_next_step() -> None:
    """The trainer's side is computed right after its step; the replicas answer whenever they can."""
    world = World(update_ends_after={-2: "train_step 3"})
    run(world, total_steps=4, replica_check=Compared(world))
    order = ["train_step 1", "remember 2", "publish 2", "live 2", "ask 2", "train_step 3", "compared"]
    assert [event for event in world.events if event in order] == order
    assert world.records[4]["weight_sync/logprob_diff"] == 1e-6 and "weight_sync/logprob_diff" not in world.records[2]
    with pytest.raises(RuntimeError, match="ask 2 broke"):
        run(failing := World(fails="ask 2"), total_steps=4, replica_check=Compared(failing))
    assert "record 4" not in failing.events


def test_where_every_batch_waits_for_the_weights_before_it_nothing_overlaps() -> None:
    world = run(World(batch_waits_for_record=True), total_steps=3)
    per_step = ["next_batch {0}", "train_step {0}", "publish {1}", "live {1}", "advance {1}", "record {1}"]
    assert world.events == [event.format(step, step + 1) for step in range(3) for event in per_step]


def test_a_step_without_an_update_is_recorded_after_the_one_before_it() -> None:
    world = run(World(update_ends_after={2: "train_step 2"}), total_steps=4, interval=2)
    assert list(world.records) == [1, 2, 3, 4]
    assert [world.evidence[step].weights for step in world.records] == [f"after {step}" for step in (1, 2, 3, 4)]
    assert [list(world.evidence[step].replicas) for step in world.records] == [[], ["replica-0"], [], ["replica-0"]]
    assert world.events.index("train_step 2") < world.events.index("record 2") < world.events.index("next_batch 3")


def test_an_interval_updates_and_advances_only_when_it_is_full() -> None:
    world = run(World(lag=5), total_steps=6, interval=3)
    changes = [event for event in world.events if event.startswith(("publish", "advance"))]
    assert changes == ["publish 3", "advance 3", "publish 6", "advance 6"]
    assert list(world.records) == [1, 2, 3, 4, 5, 6]
    assert [step for step, metrics in world.records.items() if "weight_sync/pause_ms" in metrics] == [3, 6]
    # Staleness is counted in updates: the groups are of version 0, and each version lasts three steps.
    assert [metrics["staleness/max"] for metrics in world.records.values()] == [0, 0, 0, 1, 1, 1]


def test_demonstrations_are_trained_beside_the_groups_and_are_no_part_of_their_records() -> None:
    alone = run(World(), mini_batches=2)
    stream = DemonstrationStream(random_demonstrations(0, 5), seed=0)
    world = run(World(), mini_batches=2, demonstrations=stream)
    assert world.recorded_advantages == alone.recorded_advantages
    for step, (batch, before) in enumerate(zip(world.batches, alone.batches, strict=True)):
        given = demonstration_tokens(stream.batch(step, 2))
        assert batch.num_tokens == before.num_tokens + len(given.targets)
        assert world.records[step + 1]["perf/trained_tokens"] == before.num_trained + len(given.targets)
        recorded = world.recorded_tokens[step + 1]
        assert recorded is not None and len(recorded.logprobs) == before.num_tokens
        micro_batches = batch.micro_batches[0]
        learned = [one.tokens.targets[(one.tokens.ce_weights > 0)] for one in micro_batches]  # pyright: ignore
        assert sorted(np.concatenate(learned)) == sorted(given.targets)


def test_stale_tokens_are_scored_before_they_are_trained_and_the_scores_are_recorded() -> None:
    """All tokens are of version 0: the first step has nothing to score."""
    world = run(World(), total_steps=3, algorithm=AlgorithmConfig(proximal=Proximal.exact))
    assert world.events.count("old_logprobs") == 2
    assert world.events.index("train_step 0") < world.events.index("old_logprobs") < world.events.index("train_step 1")
    first, second, _ = world.batches
    assert all(np.isnan(batch.tokens.old_logprobs).all() for batch in first.micro_batches[0])  # pyright: ignore
    scored = [batch.tokens.old_logprobs for batch in second.micro_batches[0]]
    assert sum(0 if some is None else int((some == 0).sum()) for some in scored) == second.num_tokens
    assert world.records[1]["staleness/unknown_tokens"] == 0
    assert world.records[2]["staleness/unknown_tokens"] == 1
    old, fresh = world.recorded_tokens[2], world.recorded_tokens[1]
    assert old and old.old_logprobs is not None and set(old.old_logprobs.tolist()) == {0.0}
    assert fresh and fresh.old_logprobs is not None and np.isnan(fresh.old_logprobs).all(), "pi before the step"
    plain = run(World(), total_steps=2)
    assert plain.recorded_tokens[2] is not None and plain.recorded_tokens[2].old_logprobs is None


def test_what_is_recorded_of_a_token_is_its_own_where_others_take_no_part() -> None:
    """The first of four trajectories was cut off, and the loss leaves it out."""
    algorithm = AlgorithmConfig(mask_truncated=True, proximal=Proximal.exact)
    world = run(World(finish_reasons=["length", "stop", "stop", "stop"]), total_steps=2, algorithm=algorithm)
    whole = run(World(), total_steps=2)
    for step, batch in enumerate(world.batches, start=1):
        tokens, all_tokens = world.recorded_tokens[step], whole.recorded_tokens[step]
        assert tokens is not None and tokens.old_logprobs is not None and all_tokens is not None
        assert len(tokens.logprobs) == len(all_tokens.logprobs) == whole.batches[step - 1].num_tokens
        is_left_out = np.isnan(tokens.logprobs) & (tokens.advantages == 0)
        assert is_left_out.sum() == whole.batches[step - 1].num_tokens - batch.num_tokens > 0
        assert is_left_out[0] and not is_left_out[-1], "those of the first trajectory"
        assert (np.isnan(tokens.old_logprobs) == is_left_out).all() or step == 1, "the first has no stale token"


def test_groups_that_wait_for_their_batch_are_scored_meanwhile() -> None:
    """The batch of step 1 comes when the groups that are there have been scored."""
    world = World(ready_before={1: "old_logprobs"})
    run(world, total_steps=2, algorithm=AlgorithmConfig(proximal=Proximal.exact))
    assert world.events.count("old_logprobs") == 2, "one of them for what was not known at first"
    ready, taken = world.events.index("old_logprobs"), world.events.index("next_batch 1")
    assert world.events.index("train_step 0") < ready < taken
    assert world.scored_tokens == [2 * 4 * 3, 3], "then the request that has a token of which nothing was known"


def test_a_record_has_what_its_own_step_made_of_its_tokens() -> None:
    """The next step trains before the record is written."""
    world = run(World(update_ends_after={1: "train_step 1"}), total_steps=2)
    logprobs_by_step = {step: set(tokens.logprobs.tolist()) for step, tokens in world.recorded_tokens.items() if tokens}
    assert logprobs_by_step == {1: {0.0}, 2: {-1.0}}


@pytest.mark.parametrize("fails", ["next_batch 1", "train_step 1", "publish 2", "live 2", "stage 2", "advance 2"])
def test_an_error_anywhere_ends_the_run_at_once(fails: str) -> None:
    world = World(fails=fails, due=(2,), update_ends_after={2: "train_step 2"})
    with pytest.raises(RuntimeError, match=f"{fails} broke"):
        run(world, total_steps=4, eval_every=2)
    assert fails in world.events and "publish 3" not in world.events
    assert set(world.records) <= {1}, "what is not settled is not recorded"


@pytest.mark.parametrize("total_steps", [1, 3])
def test_every_step_has_every_family_of_metrics(total_steps: int) -> None:
    world = run(World(), total_steps=total_steps, num_ranks=2)
    assert list(world.records) == list(range(1, total_steps + 1))
    for metrics in world.records.values():
        assert metrics["critic/rewards/mean"] == 0.25
        assert metrics["actor/pg_loss"] == -0.5
        assert metrics["actor/ppo_kl"] == 0.25
        assert metrics["rollout/ready_groups"] == 7
        assert metrics["rollout/engine_requests"] == 64
        assert metrics["weight_sync/pause_ms"] == 12
        assert metrics["staleness/masked_tokens"] == 3
        assert metrics["perf/tokens"] == 2 * 4 * 5
        assert metrics["perf/replica_idle"] == 0.25
        assert metrics["perf/trainer_idle"] == 1
        step_s = metrics["timing_s/step"]
        assert metrics["perf/trained_tokens"] == 2 * 4 * 3
        assert metrics["perf/throughput/trained"] == pytest.approx(24 / step_s)
        assert metrics["perf/groups_per_second"] == pytest.approx(2 / step_s)
        parts = [metrics[f"timing_s/{part}"] for part in ("wait_batch", "assemble", "train_step", "update_weights")]
        assert all(part > 0 for part in parts)
        assert sum(parts) <= step_s <= metrics["timing_s/elapsed"]
        assert {"staleness/mean", "staleness/max", "response_length/mean"} <= metrics.keys()
        assert all(type(value) is float for value in metrics.values())


OWN = "tests.unit.trainer.test_loop:twice_the_reward_less_one"


def twice_the_reward_less_one(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    return [2 * group.rewards - 1 for group in groups]


def nothing(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[FloatArray]:
    return [0 * group.rewards for group in groups]


def test_tokens_that_are_not_computed_do_not_count_as_trained() -> None:
    """Groups without a gradient, unless the entropy gives them one, and steps that are skipped."""
    flat = AlgorithmConfig(advantage=f"{__name__}:nothing")
    for world, algorithm, expected in [
        (World(), flat, 0),
        (World(), replace(flat, entropy_coef=0.1), 24),
        (World(broken_steps=(0,)), AlgorithmConfig(), 0),
        (World(broken_rollouts=(0,)), AlgorithmConfig(), 0),
    ]:
        metrics = run(world, total_steps=1, algorithm=algorithm).records[1]
        assert (metrics["perf/trained_tokens"], metrics["perf/throughput/trained"] > 0) == (expected, expected > 0)


@pytest.mark.parametrize(
    ("algorithm", "advantages"),
    [
        (AlgorithmConfig(), [1.499997] + [-0.499999] * 3),
        (AlgorithmConfig(normalize_by_std=False), [0.75] + [-0.25] * 3),
        (AlgorithmConfig(advantage="rloo"), [1.0] + [-1 / 3] * 3),
        (AlgorithmConfig(advantage=OWN), [1.0] + [-1.0] * 3),
    ],
)
def test_workers_train_on_the_groups_advantages(algorithm: AlgorithmConfig, advantages: list[float]) -> None:
    world = run(World(), total_steps=1, num_ranks=2, algorithm=algorithm)
    assert world.recorded_advantages[0] == [pytest.approx(advantages)] * 2
    (batch,) = world.batches
    assert batch.num_tokens == 2 * 4 * 3
    weights = [float(w) for rank in batch.micro_batches for b in rank for w in b.tokens.loss_weights]
    assert weights == pytest.approx([1 / 24] * 24)
    # Eight sequences of four tokens, two to a row, on two ranks.
    assert [[b.input_ids.shape for b in rank] for rank in batch.micro_batches] == [[(1, 8)] * 2] * 2
    trained = [float(a) for rank in batch.micro_batches for b in rank for a in b.tokens.advantages]
    assert sorted(trained) == pytest.approx(sorted(advantages * 2 * 3))


def test_with_a_kl_in_the_reward_the_workers_are_asked_first_and_the_step_learns_from_their_answer() -> None:
    """Rewards 1, 0, 0, 0 minus 0.5 times 0, 1, 2, 3 and then 4, 5, 6, 7."""
    algorithm = AlgorithmConfig(normalize_by_std=False, kl_reward_coef=0.5)
    world = run(World(), total_steps=1, num_ranks=2, algorithm=algorithm)
    assert world.events[:3] == ["next_batch 0", "score", "train_step 0"]
    expected = [1.5, 0, -0.5, -1]
    assert world.recorded_advantages[0] == [pytest.approx(expected)] * 2
    (asked,), (trained,) = world.scored, world.batches
    assert asked.num_tokens == sum(len(b.index) for rank in asked.micro_batches for b in rank) == 24
    for micro_batch in (b for rank in trained.micro_batches for b in rank):
        tokens = micro_batch.tokens
        assert tokens.reference_logprobs is not None
        assert tokens.reference_logprobs.tolist() == (-micro_batch.index).tolist()
        assert tokens.advantages.tolist() == pytest.approx([expected[index // 3 % 4] for index in micro_batch.index])
    assert sum(len(b.index) for rank in trained.micro_batches for b in rank) == 18, "without the advantage of 0"
    assert world.records[1]["actor/reward_kl_penalty"] == pytest.approx(28 / 24)
    assert world.records[1]["timing_s/score"] > 0


def test_mini_batches_and_epochs_are_one_step_of_one_version() -> None:
    world = run(World(), total_steps=1, mini_batches=2, epochs=3)
    assert world.events == ["next_batch 0", "train_step 0", "publish 1", "live 1", "advance 1", "record 1"]
    (batch,) = world.batches
    assert len(batch.optimizer_steps) == 6 and len(set(batch.optimizer_steps)) == 2
    weights = [float(w) for rank in batch.micro_batches for b in rank for w in b.tokens.loss_weights]
    assert weights == pytest.approx([1 / 12] * 24), "each half has a mean of its own"
    assert world.recorded_advantages[0] == [pytest.approx([1.499997] + [-0.499999] * 3)] * 2
    assert world.records[1]["perf/trained_tokens"] == 24, "each once"


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_of_the_moment_before_slots_are_freed_and_counts_once_the_step_is_recorded() -> None:
    """It is of version 2: before step 2 begins, and with everything settled that came before."""
    world = run(World(due=(2,), update_ends_after={1: "train_step 1", 2: "train_step 2"}), total_steps=3)
    assert world.events[5:15] == [
        "live 1",
        "advance 1",
        "record 1",
        "stage 2",
        "publish 2",
        "next_batch 2",
        "train_step 2",
        "live 2",
        "advance 2",
        "record 2",
    ]
    assert world.events[15] == "commit {'recorder': b'after record 2'}"
    assert ["timing_s/checkpoint" in metrics for metrics in world.records.values()] == [False, True, False]


def test_the_last_checkpoint_waits_for_the_update_in_which_workers_may_start_again() -> None:
    world = run(World(due=(2,)))
    last = [event for event in world.events if event.endswith("2") or event.startswith("commit")]
    assert last == ["publish 2", "live 2", "stage 2", "advance 2", "record 2", "commit {'recorder': b'after record 2'}"]


@pytest.mark.parametrize(
    ("ends_at", "interval", "last"),
    [
        *(("next_batch 1", 1, 2), ("train_step 1", 1, 2), ("live 2", 1, 3), ("train_step 0", 3, 3)),
        ("stage 2", 1, 3),  # a checkpoint that was due: what is saved before the warning is not the last
        ("train_step 5", 1, 6),  # nothing is left to cut short
    ],
)
def test_a_run_that_is_to_end_early_saves_the_next_live_weights_and_takes_no_step_after_them(
    ends_at: str, interval: int, last: int
) -> None:
    world = run(World(due=(2,), ends_at=ends_at, evaluation_ends_after="never"), total_steps=6, interval=interval)
    assert list(world.records) == list(range(1, last + 1))
    saved = [event for event in world.events if event.startswith("stage")]
    assert saved[-1] == ("stage 2" if last == 6 else f"stage {last}")
    if last < 6:
        assert world.events[-1] == f"commit {{'recorder': b'after record {last}'}}"


def test_a_run_that_is_to_end_early_waits_for_no_evaluation_and_begins_none() -> None:
    for ends_at in ("publish 3", "train_step 1"):
        world = run(World(ends_at=ends_at, evaluation_ends_after="never"), total_steps=9, eval_every=2)
        assert world.evaluations == [] and world.events[-1].startswith("commit")
        assert world.events.count("evaluate") == (ends_at == "publish 3")


# -- evaluations: which are due, and under which version they are recorded ---------------------------------------------


@pytest.mark.parametrize(
    ("total_steps", "interval", "eval_every", "expected"),
    [
        *((6, 1, 2, [2, 4]), (5, 1, 2, [2, 4]), (3, 1, 0, []), (3, 1, 1, [1, 2]), (3, 1, 3, [])),
        (12, 3, 4, [6, 9]),  # due at 4 and 8: after the next update
    ],
)
def test_evaluation_steps_leave_the_last_to_the_caller(
    total_steps: int, interval: int, eval_every: int, expected: list[int]
) -> None:
    world = run(World(), total_steps=total_steps, interval=interval, eval_every=eval_every)
    assert [step for step, _ in world.evaluations] == expected


def test_steps_and_updates_go_on_while_an_evaluation_lasts_and_it_is_recorded_under_the_version_it_began_with() -> None:
    world = run(World(evaluation_ends_after="record 5"), total_steps=6, eval_every=2)
    events = [event for event in world.events if event.startswith(("publish", "evaluate", "record"))]
    assert events[:6] == ["publish 1", "record 1", "publish 2", "record 2", "evaluate", "publish 3"]
    assert events.index("publish 5") < events.index("record_evaluation 2")
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
    ("first_step", "evaluated", "expected"),
    [(2, 0, [2, 4]), (2, 2, [4]), (3, 0, [3, 4]), (3, 2, [4]), (0, -1, [2, 4]), (1, 0, [2, 4]), (6, 4, [])],
)
def test_a_resumed_loop_begins_with_an_evaluation_that_was_due_and_has_not_ended(
    first_step: int, evaluated: int, expected: list[int]
) -> None:
    world = World(live=first_step, newest_evaluated=evaluated)
    run(world, total_steps=6, eval_every=2, first_step=first_step)
    assert [step for step, _ in world.evaluations] == expected
    assert list(world.records) == list(range(first_step + 1, 7))
    if first_step in expected:
        assert world.events[0] == "evaluate", "it takes its replicas before the first step"


# -- steps that NaN or infinity would break ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "step"), [(World(broken_steps=(1,)), "train_step 1"), (World(broken_rollouts=(1,)), "skip_step 1")]
)
def test_a_skipped_step_is_recorded_its_version_goes_live_and_the_next_is_taken(world: World, step: str) -> None:
    """Broken logprobs of the rollouts are found before the step, which no worker takes."""
    run(world, total_steps=3)
    events = [event for event in world.events if event.split()[-1] == "2" or event == step]
    assert events[:5] == [step, "record_skipped 2", "publish 2", "live 2", "next_batch 2"]
    assert world.events.index("record 1") < world.events.index("record_skipped 2"), "the recorder saves both in order"
    assert list(world.records) == [1, 2, 3]
    assert [metrics["actor/skipped_steps"] for metrics in world.records.values()] == [0, 1, 0], "of the step"
    if world.broken_rollouts:
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
