"""A recorded run that is as it must be: what an audit finds nothing in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from configs.schema import AlgorithmConfig, Config, EvaluationConfig, TrainerConfig
from rollout.evaluation.evaluator import Evaluation
from rollout.replica.sampled_log import SampledLog
from rollout.request_ids import RequestId
from rollout.sampled_tokens import new_record
from rollout.types import (
    Completion,
    DiscardedGroup,
    DiscardReason,
    EvaluatedPrompt,
    EvaluatedSample,
    GenerationRequest,
    SamplingParams,
    TrajectoryGroup,
)
from tests.support.fakes import make_group
from tests.support.recordings import Screen
from tests.support.sequences import only
from trainer.advantages.estimators import group_advantages, grpo
from trainer.tokens import TrainedTokens
from trainer.tracking.proof import Evidence, Origin
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import JsonlSink, Tracker
from trainer.tracking.step_metrics import group_metrics

STEPS, PROMPTS, GROUP_SIZE, VAL_PROMPTS = 4, 2, 4, 3
CONFIG = Config(
    trainer=TrainerConfig(total_steps=STEPS, prompts_per_step=PROMPTS),
    algorithm=AlgorithmConfig(group_size=GROUP_SIZE),
    evaluation=EvaluationConfig(samples=2, temperature=1.0),
)
ORIGIN = Origin(policy="tiny", weights="", num_ranks=1, num_threads=1, device="a processor", software={})
GroupsOf = Callable[[int], list[TrajectoryGroup]]
DISCARDED = 3
"""An ordinal."""


def groups_of(step: int) -> list[TrajectoryGroup]:
    """Half of the tokens are of the newest weights, the others of those before."""
    ordinals = [ordinal for ordinal in range(2 * STEPS + 1) if ordinal != DISCARDED][2 * step - 2 : 2 * step]
    groups = [make_group(ordinal, max(0, step - 2), step - 1, group_size=GROUP_SIZE) for ordinal in ordinals]
    return [
        replace(
            group,
            prompt=replace(group.prompt, row=group.prompt.ordinal),
            trajectories=tuple(replace(t, reward=float(i % 2)) for i, t in enumerate(group.trajectories)),
        )
        for group in groups
    ]


def evaluation(version: int, num_samples: int = 2) -> Evaluation:
    samples = tuple(
        EvaluatedSample(accuracy=float(i % 2), answer="7", num_tokens=3, versions=frozenset({version}), response="7")
        for i in range(num_samples)
    )
    prompts = (EvaluatedPrompt(ordinal=n, data_source="", samples=samples, text="?") for n in range(VAL_PROMPTS))
    return Evaluation(prompts=tuple(prompts), pinned=True)


def record(
    run_dir: Path,
    config: Config = CONFIG,
    *,
    finished: bool = True,
    groups_of: GroupsOf = groups_of,
    reason: DiscardReason = DiscardReason.filtered,
) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
    recorder = RunRecorder(run_dir, Tracker([JsonlSink(run_dir / "metrics.jsonl")]), Screen(), record_tokens=True)
    recorder.record_evaluation(0, evaluation(0))
    discarded = make_group(DISCARDED, 0, group_size=GROUP_SIZE)
    recorder.record_discarded(
        DiscardedGroup(
            prompt=replace(discarded.prompt, row=DISCARDED), reason=reason, trajectories=discarded.trajectories
        )
    )
    take_steps(recorder, 1, STEPS, groups_of, config.weight_sync.interval)
    recorder.record_evaluation(STEPS, evaluation(STEPS))
    if finished:
        counts = {f"{one.name}_groups": int(one is reason) for one in DiscardReason}
        recorder.certified(lambda: recorder.write_summary(counts))


def take_steps(
    recorder: RunRecorder, first: int, last: int, groups_of: GroupsOf = groups_of, interval: int = 1
) -> None:
    for step in range(first, last + 1):
        groups = groups_of(step)
        rewards = [np.array([trajectory.shaped_reward for trajectory in group.trajectories]) for group in groups]
        advantages = group_advantages(groups, rewards, grpo, CONFIG.algorithm)
        metrics = group_metrics(groups, advantages, step - 1, interval)
        metrics |= {"timing_s/step": 1.0, "timing_s/elapsed": float(step), "weight_sync/pause_ms": 1.0}
        num_tokens = sum(trajectory.num_loss_tokens for group in groups for trajectory in group.trajectories)
        logprobs = np.linspace(-1, 0, num_tokens, dtype=np.float32)
        trained = replace(TrainedTokens.none(num_tokens), logprobs=logprobs)
        recorder.record_step(step, metrics, groups, advantages, trained, Evidence(weights=f"{step:016x}"))


def sample(run_dir: Path, last: int = STEPS) -> None:
    """Record what the steps up to `last` train as sampled."""
    log = SampledLog(new_record(run_dir, "r0"))
    for group in (group for step in range(1, last + 1) for group in groups_of(step)):
        for index, trajectory in enumerate(group.trajectories):
            name, sequence = RequestId(ordinal=group.prompt.ordinal, episode=index), only(trajectory)
            prompt_ids = tuple(sequence.prompt_ids.tolist())
            log.begin(GenerationRequest(request_id=name, prompt_ids=prompt_ids, sampling=SamplingParams()))
            tokens = {"token_ids": sequence.response_ids, "logprobs": sequence.rollout_logprobs}
            log.end(name, Completion(**tokens, spans=sequence.spans, finish_reason="stop"))
