"""Bugs that other frameworks have shipped, each put back by a patch of one place: every one is noticed by what always
runs, within the step in which it happens. docs/proof.md lists them; those that need an engine are in
tests/system/rollout/engines/test_injected_faults.py.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.rollout import RewardPlace
from configs.schema import Config, RolloutConfig
from rollout.agents.loop import SingleTurn
from rollout.agents.worker import AgentWorker
from rollout.engines import simulated
from rollout.errors import OtherRewardError
from rollout.progress import Attempt
from rollout.replica.pause import PauseControl
from rollout.replica.replica import RolloutReplica, WeightVerificationError
from rollout.rewards.base import RewardResult
from rollout.rewards.scoring import RewardScorer, load_scorer
from rollout.snapshot import LostPromptsError, restore
from rollout.staleness import StalenessWindow
from rollout.types import (
    UNKNOWN,
    Completion,
    KeptTokens,
    Prompt,
    SamplingParams,
    TokenSequence,
    TrajectoryGroup,
    VersionSpan,
)
from scripts.observe.audit import audit
from tests.support import recorded_runs
from tests.support.compose import changed
from tests.support.fakes import (
    ClockedEngine,
    make_completion,
    make_manifest,
    make_replica,
    make_request,
    run_virtual,
    start_group,
    update,
)
from tests.support.letters import FakeReplica, FakeTokenizer
from tests.support.recorded_runs import STEPS, record
from tests.support.reference import make_group, make_trajectory
from tests.support.rollouts import CheckpointedRun, RolloutSetup, group_of
from tests.support.shadow_models import CPU, NUM_TENSORS, LoadedParameter, Model, checkpoint, load_whole
from trainer.advantages.estimators import group_advantages
from trainer.batch_check import BatchCheck, BrokenBatchError
from weight_sync.protocol import Manifest, TensorEntry, WeightUpdateError
from weight_sync.published import PublishedTensors
from weight_sync.receiver.shadow import Shadow

OTHERS_LIVE = "live are other weights than those that were staged"

# -- the weights -------------------------------------------------------------------------------------------------------


def test_weights_that_were_not_delivered_while_the_version_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = Shadow(Model(), CPU)
    shadow.load(checkpoint(1).items(), NUM_TENSORS)
    shadow.swap_in()
    shadow.require_live()
    shadow.load(checkpoint(2).items(), NUM_TENSORS)
    monkeypatch.setattr(Shadow, "swap_in", lambda shadow: None)
    shadow.swap_in()
    with pytest.raises(RuntimeError, match=f"^{OTHERS_LIVE}: embed, layers.0.gate_up, layers.0.down, layers.1"):
        shadow.require_live()


def manifest(version: int, *checksums: int, trained: str) -> Manifest:
    entries = tuple(TensorEntry(f"layers.{place}.weight", "float32", (1,), 0, 4) for place in range(len(checksums)))
    return replace(make_manifest(version), tensors=entries, checksums=(checksums,), trained=trained)


def test_weights_that_the_trainer_publishes_as_they_were_before() -> None:
    """What is published is a copy that nobody renews. Its bytes arrive, and every checksum is right."""
    published = PublishedTensors()
    published.note(manifest(0, 5, 7, trained=""))
    published.note(manifest(1, 5, 7, trained="a"))  # nobody knows what was trained before
    published.note(manifest(2, 5, 7, trained="a"))  # a step without a gradient
    assert published.unchanged == {"layers.0.weight": 0, "layers.1.weight": 0}
    with pytest.raises(
        WeightUpdateError, match="^version 3: the trained weights have changed since version 2, and none"
    ):
        published.note(manifest(3, 5, 7, trained="b"))
    published.note(manifest(3, 5, 8, trained="b"))
    assert published.unchanged == {"layers.0.weight": 0}


def untied() -> Model:
    """A model whose head has a parameter of its own, which no checkpoint has a tensor for."""
    model = Model()
    model.head.weight = LoadedParameter(torch.ones(5, 3), weight_loader=load_whole)
    return model


def without_up() -> Model:
    """A model whose loader passes over one of two parts of a fused parameter."""
    model = Model()
    for layer in model.layers:
        layer.gate_up.data.fill_(1)
        load = layer.gate_up.weight_loader
        layer.gate_up.weight_loader = lambda p, t, shard, load=load: load(p, t, shard) if shard == "gate" else None
    return model


@pytest.mark.parametrize(
    ("make", "named"), [(untied, "head.weight: "), (without_up, r"layers.0.gate_up \(50% of it\), layers.1.gate_up ")]
)
def test_a_tied_or_fused_tensor_that_updates_leave_out(make: Any, named: str) -> None:
    with pytest.raises(RuntimeError, match=f"^Model: no published tensor has written {named}"):
        Shadow(make(), CPU).load(checkpoint(1).items(), NUM_TENSORS)


def test_what_engines_pad_with_and_what_the_trainer_never_trains_is_not_left_out() -> None:
    model = untied()
    shadow = Shadow(model, CPU)
    shadow.load(checkpoint(1).items(), NUM_TENSORS, constants=("model.router.weight",))
    shadow.swap_in()
    assert torch.equal(model.head.weight, torch.ones(5, 3)), "it keeps its values"
    model.head.weight.data.zero_()
    Shadow(model, CPU).load(checkpoint(1).items(), NUM_TENSORS)


def test_a_bfloat16_parameter_that_the_swap_leaves_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of it differs, in the last bit, as after a small step."""
    model = Model(dtype=torch.bfloat16)
    shadow, weights = Shadow(model, CPU), checkpoint(1)

    def all_but_the_embedding(shadow: Shadow) -> None:
        for live, copy in shadow._pairs:
            if live is not model.embed:
                live.data.copy_(copy)

    shadow.load(weights.items(), NUM_TENSORS)
    shadow.swap_in()
    shadow.require_live()
    weights["embed"] = weights["embed"].bfloat16()
    weights["embed"].view(-1).view(torch.int16)[7] += 1
    shadow.load(weights.items(), NUM_TENSORS)
    monkeypatch.setattr(Shadow, "swap_in", all_but_the_embedding)
    shadow.swap_in()
    with pytest.raises(RuntimeError, match=f"^{OTHERS_LIVE}: embed$"):
        shadow.require_live()


# -- the replica -------------------------------------------------------------------------------------------------------


def test_a_replica_that_resumes_before_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = PauseControl._freeze

    async def thawed_at_once(control: PauseControl, clear_cache: bool) -> None:
        await settled(control, clear_cache)
        await control._engine.thaw()

    async def main() -> None:
        replica = make_replica("r", ClockedEngine())
        await update(replica, 0)
        group = start_group(replica, 9)
        await asyncio.sleep(1.5)
        monkeypatch.setattr(PauseControl, "_freeze", thawed_at_once)
        with pytest.raises(RuntimeError, match="^version 1 cannot be swapped in: the engine runs$"):
            await update(replica, 1)
        assert replica.global_steps == 0 and (await replica.status()).torn
        group.cancel()

    run_virtual(main())


def test_a_request_in_flight_that_is_taken_for_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labelled = simulated._completion

    def at_the_end(tokens: list[int], *arguments: Any) -> Completion:
        return labelled([max(tokens, default=0)] * len(tokens), *arguments)

    async def main() -> None:
        replica = make_replica("r", ClockedEngine())
        await update(replica, 0)
        before, spanning = start_group(replica, 2), start_group(replica, 5, prefix="spanning ")
        await asyncio.sleep(2.5)
        await before
        await update(replica, 1)
        with pytest.raises(
            WeightVerificationError, match="came before version 1 was live on r, and is said to be of it"
        ):
            await spanning
        assert [span.global_steps for span in (await start_group(replica, 2, prefix="after "))[0].spans] == [1]

    monkeypatch.setattr(simulated, "_completion", at_the_end)
    run_virtual(main())


def test_a_version_that_is_lower_after_a_failover() -> None:
    """A replica that is behind goes on with a request of one that was ahead: nobody compared their versions."""

    async def main() -> Completion:
        behind: RolloutReplica = make_replica("behind", ClockedEngine())
        await update(behind, 4)
        request = replace(make_request("3-0", 4), partial=make_completion([7, 7], [5, 5], ""))
        [completion] = await behind.generate_group([request])
        return completion

    completion = run_virtual(main())
    sequence = TokenSequence.of([1, 2], completion)
    trajectory = replace(make_trajectory([1, 2], [7]), sequences=(sequence,))
    with pytest.raises(
        BrokenBatchError, match=r"^step 7 is not trained: prompt 3, trajectory 0, its versions descend: \[5,"
    ):
        BatchCheck(Config()).refuse([make_group(3, [trajectory])], 6)


# -- what is trained ---------------------------------------------------------------------------------------------------


def multi_turn(loss_mask: Sequence[bool]) -> TrajectoryGroup:
    """A turn, two tokens of an environment, and a turn."""
    spans = VersionSpan(0, 2, 3), VersionSpan(4, 6, 4)
    return make_group(8, [make_trajectory([1], [5, 6, 7, 8, 9, 9], loss_mask=loss_mask, spans=spans)])


@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_that_is_shifted_over_turns(by: int) -> None:
    mask = np.array([True, True, False, False, True, True])
    check = BatchCheck(changed(Config(), rollout__agent_loop="my:loop"))
    check.refuse([multi_turn(mask.tolist())], 4)
    shifted = np.roll(mask, by)
    with pytest.raises(BrokenBatchError, match="prompt 8, trajectory 0, token . is in the loss, and nobody sampled it"):
        BatchCheck(Config()).refuse([multi_turn(shifted.tolist())], 4)


def test_a_mask_that_is_shifted_within_one_turn() -> None:
    """Nothing but sampled tokens is left in the loss, and one of them is not. A user's loop may want this."""
    group = make_group(8, [make_trajectory([1], [5, 6, 7], loss_mask=[False, True, True])])
    with pytest.raises(BrokenBatchError, match="prompt 8, trajectory 0, token 0 was sampled, and is not in the loss"):
        BatchCheck(Config()).refuse([group], 0)
    BatchCheck(changed(Config(), rollout__agent_loop="my:loop")).refuse([group], 0)


def test_what_the_stale_policy_takes_out_of_the_loss_is_no_shifted_mask() -> None:
    spans = VersionSpan(0, 1, 0), VersionSpan(1, 3, 3)
    group = make_group(8, [make_trajectory([1], [5, 6, 7], loss_mask=[False, True, True], spans=spans)])
    BatchCheck(Config()).refuse([group], 4)


def test_a_token_of_which_nobody_knows_what_it_was_drawn_from_is_no_shifted_mask() -> None:
    kept = KeptTokens(counts=np.array([2, UNKNOWN, 2], np.int32), token_ids=np.array([5, 8, 7, 8], np.int32))
    sequence = TokenSequence.of([1, 2], replace(make_completion([5, 6, 7], [3, 3, 3], "stop"), kept=kept))
    assert sequence.loss_mask.tolist() == [True, False, True]
    trajectory = replace(make_trajectory([1, 2], [5]), sequences=(sequence,))
    BatchCheck(Config()).refuse([make_group(8, [trajectory])], 3)
    shifted = replace(sequence, loss_mask=np.array([False, False, True]))
    with pytest.raises(BrokenBatchError, match="prompt 8, trajectory 0, token 0 was sampled, and is not in the loss"):
        BatchCheck(Config()).refuse([make_group(8, [replace(trajectory, sequences=(shifted,))])], 3)


def test_a_trajectory_that_is_trained_twice() -> None:
    check, group = BatchCheck(Config()), make_group(8, [make_trajectory([1], [5])])
    check.refuse([group, make_group(9, [make_trajectory([1], [5])])], 0)
    with pytest.raises(BrokenBatchError, match="^step 2 is not trained: prompt 8 was trained before"):
        check.refuse([make_group(10, [make_trajectory([1], [5])]), group], 1)
    with pytest.raises(BrokenBatchError, match="^step 1 is not trained: prompt 8 is in the batch twice"):
        BatchCheck(Config()).refuse([group, group], 0)


def test_a_staleness_bound_that_is_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are slots for one version more than there should be."""
    horizon = StalenessWindow.horizon.fget
    assert horizon is not None
    monkeypatch.setattr(StalenessWindow, "horizon", property(lambda window: horizon(window) + window.update_interval))
    check = BatchCheck(changed(Config(), rollout__max_staleness=1))

    async def main() -> None:
        setup = RolloutSetup([1.0], num_steps=6, max_staleness=1)
        producing = asyncio.create_task(setup.rollouter.run())
        try:
            for step in range(6):
                batch = await setup.buffer.next_batch(step)
                check.refuse(batch.groups, step)
                await asyncio.sleep(1)
                setup.runner.live = step + 1
                await setup.buffer.advance(step + 1)
        finally:
            producing.cancel()

    with pytest.raises(
        BrokenBatchError, match=r"^step 3 is not trained: .* is 2 versions old, rollout.max_staleness=1$"
    ):
        run_virtual(main())


@pytest.mark.parametrize(("by", "what"), [(3, "skip 3"), (-1, "repeat 1")])
def test_prompts_that_a_resume_skips_or_repeats(by: int, what: str) -> None:
    async def main() -> None:
        state = await CheckpointedRun([1.0, 9.0, 3.0]).until(3)
        again = CheckpointedRun([1.0], global_steps=3)
        with pytest.raises(LostPromptsError, match=f"would go on at prompt [0-9]+: it would {what}$"):
            restore(replace(state, next_ordinal=state.next_ordinal + by), again.rollouter)
        restore(replace(state, num_trained=None), CheckpointedRun([1.0], global_steps=3).rollouter)  # an older one

    run_virtual(main())


# -- what is learned from it -------------------------------------------------------------------------------------------


def by_length(prompt: Prompt, text: str) -> float:
    return float(len(text))


def of_letters(prompt: Prompt, text: str) -> float:
    return float(text.isalpha())


@pytest.mark.parametrize("reward", [f"{__name__}:by_length", f"{__name__}:by_length + 0.5*{__name__}:of_letters"])
def test_the_reward_of_another_episode(monkeypatch: pytest.MonkeyPatch, reward: str) -> None:
    """The results come in the order in which they were ready, and not in that of the responses."""
    score = RewardScorer.score

    async def as_they_come(scorer: RewardScorer, responses: Any) -> list[RewardResult]:
        return (await score(scorer, responses))[::-1]

    monkeypatch.setattr(RewardScorer, "score", as_they_come)
    rollout = RolloutConfig(reward=reward, reward_runs_in=RewardPlace.loop)
    sampling = SamplingParams(max_tokens=8)

    async def main() -> TrajectoryGroup:
        scorer, config = load_scorer(rollout), replace(Config(), rollout=rollout)
        answers: Any = {"r": FakeReplica("ab", "abcd").generate}
        worker = AgentWorker(
            config=config, tokenizer=FakeTokenizer(), loop=SingleTurn(), scorer=scorer, replicas=answers
        )
        prompt = Prompt(ordinal=4, text="?", token_ids=(1,), ground_truth="")
        return await group_of(worker.run_group(prompt, "r", sampling, 2, Attempt()))

    with pytest.raises(
        OtherRewardError, match="^prompt 4, trajectory 0: its reward was computed for the response of ano"
    ):
        run_virtual(main())
    monkeypatch.undo()
    assert [trajectory.error for trajectory in run_virtual(main()).trajectories] == [None, None]


def test_group_statistics_that_are_taken_after_some_of_the_group_were_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of_the_best(groups: Sequence[TrajectoryGroup], rewards: Any, *rest: Any) -> Any:
        kept = [np.argsort(some)[1:] for some in rewards]  # the worst is not used, and so not counted
        fewer = [
            replace(g, trajectories=tuple(g.trajectories[i] for i in k)) for g, k in zip(groups, kept, strict=True)
        ]
        some = group_advantages(fewer, [r[k] for r, k in zip(rewards, kept, strict=True)], *rest)
        advantages = [np.zeros(len(group.trajectories), np.float32) for group in groups]
        for into, places, values in zip(advantages, kept, some, strict=True):
            into[places] = values
        return advantages

    monkeypatch.setattr(recorded_runs, "group_advantages", of_the_best)
    record(tmp_path)
    findings = audit(tmp_path).findings
    assert [finding.partition(",")[0] for finding in findings] == [f"step {step}" for step in range(1, STEPS + 1)]
    assert findings[0].endswith("trajectory 0: its advantage is 0, the rewards of its group make it -0.866024")
