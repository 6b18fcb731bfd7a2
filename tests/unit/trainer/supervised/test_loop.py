"""The train loop over demonstrations, on workers that write down their calls: order, what is due, skips, resuming."""

import asyncio
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config, TrainerConfig
from rollout.types import FloatArray
from scripts.launch.sft_run import supervised, train
from tests.support.demonstrations import random_demonstrations
from tests.support.recordings import Screen
from trainer.batch import StepBatch, StepResult
from trainer.loop import SkippedStepsError, TrainLoop
from trainer.metrics import Last, Max, Sum
from trainer.supervised.demonstrations import DemonstrationSource, DemonstrationStream, Validator
from trainer.supervised.recorder import SUPERVISED, OtherConversationsError, SupervisedRecorder
from trainer.tokens import demonstration_tokens
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker, read_metrics

GROUPS = random_demonstrations(0, 8)
for number, group in enumerate(GROUPS, 1):
    group.prompt.extra["place"] = f"rows.jsonl:{number}"


@dataclass
class Workers:
    """Train workers and the checkpointer. The loss of a validation is the number of steps before it."""

    broken_steps: tuple[int, ...] = ()
    global_steps: int = 0
    due: tuple[int, ...] = ()
    events: list[str] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    batches: list[StepBatch] = field(default_factory=list)

    async def train_step(self, batch: StepBatch, global_steps: int) -> StepResult:
        self.events.append(f"train {global_steps}")
        self.global_steps = global_steps + 1
        self.batches.append(batch)
        is_broken = global_steps in self.broken_steps
        loss = Sum(math.nan if is_broken else 1 / (global_steps + 1))
        skipped = Last(float(is_broken))
        return StepResult({"actor/ce_loss": loss, "actor/skipped_steps": skipped, "perf/trainer_busy_s": Max(0.0)})

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        self.events.append("validate")
        return np.full(batch.num_tokens, -self.global_steps, np.float32)

    def is_due(self, global_steps: int) -> bool:
        return global_steps in self.due

    async def stage(self, global_steps: int, *, is_last: bool) -> None:
        self.events.append(f"stage {global_steps}")

    def commit(self, files: dict[str, bytes]) -> None:
        self.events.append("commit")
        self.states.append(files[SUPERVISED])

    def gauges(self) -> dict[str, float]:
        return {"trainer/restarts": 0.0}


def recorder_in(run_dir: Path) -> SupervisedRecorder:
    return SupervisedRecorder(run_dir, Tracker([JsonlSink(run_dir / METRICS_FILE)]), Screen())


def run(workers: Any, recorder: SupervisedRecorder, *, first_step: int = 0, seed: int = 0, **trainer: int) -> None:
    keys: dict[str, Any] = {"total_steps": 4, "prompts_per_step": 3, "eval_every": 2} | trainer
    config = supervised(Config(seed=seed, trainer=TrainerConfig(**keys)))
    stream = DemonstrationStream(GROUPS, config.seed)
    recorder.begin(stream.checksum())
    workers.global_steps = first_step
    size = config.trainer.prompts_per_step
    loop = TrainLoop(
        config=config,
        buffer=DemonstrationSource(stream, size, first_step, recorder.num_taken(size)),
        workers=workers,
        manager=None,
        evaluate=Validator(workers, GROUPS[:2], config).evaluate,
        fleet_gauges=None,
        recorder=recorder,
        checkpointer=workers,
        snapshot=SUPERVISED,
    )
    try:
        asyncio.run(train(loop, first_step))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def test_steps_checkpoints_and_validations_come_in_order(tmp_path: Path) -> None:
    workers = Workers(due=(3,))
    run(workers, recorder_in(tmp_path))
    assert workers.events == [
        *("validate", "train 0", "train 1", "validate", "train 2", "stage 3", "commit", "train 3", "validate"),
    ]
    records = read_metrics(tmp_path / METRICS_FILE)
    assert [(one["step"], one["eval/ce_loss"]) for one in records if "eval/ce_loss" in one] == [(0, 0), (2, 2), (4, 4)]
    steps = [one for one in records if "actor/ce_loss" in one]
    assert [one["sft/epoch"] for one in steps] == [0.375, 0.75, 1.125, 1.5]
    assert [one["perf/trained_tokens"] for one in steps] == [batch.num_tokens for batch in workers.batches]
    assert not any(key.startswith(("critic/", "rollout/", "staleness/", "weight_sync/")) for key in steps[0])


def test_without_conversations_for_it_nothing_is_validated_and_0_validates_the_ends(tmp_path: Path) -> None:
    workers = Workers()
    run(workers, recorder_in(tmp_path), eval_every=0)
    assert workers.events.count("validate") == 2 and workers.events[0] == workers.events[-1] == "validate"


def test_a_resumed_run_takes_what_it_would_have_taken_and_its_records_go_on(tmp_path: Path) -> None:
    whole = Workers(due=(2,))
    run(whole, recorder_in(tmp_path))
    recorder, resumed = recorder_in(tmp_path), Workers()
    recorder.restore(whole.states[0], 2, SetAside(tmp_path, 2))
    assert [one["step"] for one in read_metrics(tmp_path / METRICS_FILE)] == [0, 1, 2, 2]
    run(resumed, recorder, first_step=2)
    assert resumed.events == ["train 2", "train 3", "validate"], "version 2 has been validated"
    for ours, theirs in zip(resumed.batches, whole.batches[2:], strict=True):
        for mine, other in zip(ours.micro_batches[0], theirs.micro_batches[0], strict=True):
            assert np.array_equal(mine.input_ids, other.input_ids)
    assert [one["step"] for one in read_metrics(tmp_path / METRICS_FILE)] == [0, 1, 2, 2, 3, 4, 4]
    summary = recorder.write_summary({"too_long": 0})
    assert summary["trained_tokens"] == sum(batch.num_tokens for batch in whole.batches)
    assert json.loads((tmp_path / "summary.json").read_bytes()) == summary


def test_a_run_that_goes_on_with_other_batches_takes_each_conversation_once(tmp_path: Path) -> None:
    whole, recorder, resumed = Workers(due=(1,)), recorder_in(tmp_path), Workers()
    run(whole, recorder_in(tmp_path), prompts_per_step=4, total_steps=2)
    recorder.restore(whole.states[0], 1, SetAside(tmp_path, 1))
    run(resumed, recorder, first_step=1, prompts_per_step=2, total_steps=3)
    taken = [whole.batches[0], *resumed.batches]
    learned = [part.tokens.targets for batch in taken for part in batch.micro_batches[0]]
    assert sorted(np.concatenate(learned)) == sorted(demonstration_tokens(GROUPS).targets)
    epochs = {one["step"]: one["sft/epoch"] for one in read_metrics(tmp_path / METRICS_FILE) if "sft/epoch" in one}
    assert epochs == {1: 0.5, 2: 0.75, 3: 1.0}


def test_a_checkpoint_that_does_not_say_what_was_taken_goes_on_by_its_steps(tmp_path: Path) -> None:
    whole, recorder = Workers(due=(2,)), recorder_in(tmp_path)
    run(whole, recorder_in(tmp_path))
    state = json.loads(whole.states[0])
    assert state.pop("taken") == 6
    recorder.restore(json.dumps(state).encode(), 2, SetAside(tmp_path, 2))
    run(resumed := Workers(), recorder, first_step=2)
    for ours, theirs in zip(resumed.batches, whole.batches[2:], strict=True):
        assert np.array_equal(ours.micro_batches[0][0].input_ids, theirs.micro_batches[0][0].input_ids)


def test_a_run_on_other_conversations_or_another_seed_does_not_go_on(tmp_path: Path) -> None:
    whole = Workers(due=(2,))
    run(whole, recorder_in(tmp_path))
    recorder = recorder_in(tmp_path)
    recorder.restore(whole.states[0], 2, SetAside(tmp_path, 2))
    with pytest.raises(OtherConversationsError):
        run(Workers(), recorder, first_step=2, seed=1)


def test_skipped_steps_are_counted_and_one_too_many_ends_the_run_with_the_lines_of_its_batch(tmp_path: Path) -> None:
    workers, recorder = Workers(broken_steps=(1,)), recorder_in(tmp_path)
    run(workers, recorder, max_skipped_steps=1)
    steps = [one for one in read_metrics(tmp_path / METRICS_FILE) if "actor/ce_loss" in one]
    assert [one["actor/skipped_steps"] for one in steps] == [0, 1, 1, 1]
    assert [one["perf/trained_tokens"] > 0 for one in steps] == [True, False, True, True]
    with pytest.raises(SkippedStepsError, match=r"not finite: actor/ce_loss=nan; its conversations are rows\.jsonl:\d"):
        run(Workers(broken_steps=(1,)), recorder_in(tmp_path / "other"), max_skipped_steps=0)
