"""The records of a run's trajectories. Each dataclass is a line of a JSONL file in the run folder:

trajectories/step_000012.jsonl   TrajectoryRecord   what step 12 trained
trajectories/step_000012.npz     `token_arrays`     the tokens and logprobs of the same, with trainer.record_tokens
evaluations/step_000012.jsonl    SampleRecord       what an evaluation of version 12 got
discarded/step_000012.jsonl      DiscardRecord      the groups that were discarded while step 12 was the next, and why
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.types import (
    DiscardedGroup,
    EvaluatedPrompt,
    FloatArray,
    KeptTokens,
    Prompt,
    Routes,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from trainer.tokens import TrainedTokens, join

TRAJECTORIES = "trajectories"
EVALUATIONS = "evaluations"
DISCARDED = "discarded"
TRAINED = {
    "logprobs": "trainer_logprobs",
    "advantages": "token_advantages",
    "is_clipped": "is_clipped",
    "is_rejected": "is_rejected",
    "old_logprobs": "old_logprobs",
}
"""The fields of `TrainedTokens`, with the names of their arrays in the file."""
TOKEN_FORMAT, KEPT_FORMAT, ROUTED_FORMAT, SHARED_ROUTES_FORMAT = FORMATS = (2, 3, 4, 5)
"""The versions of the files of `token_arrays`: plain, with the tokens that sampling kept, with the experts of the
inputs, and with those of prompts apart from them. Without either, what was trained cannot be trained again. 1 had no
`format` and no `baselines`, which remax needs."""
_STEP_FILE = re.compile(r"step_(\d{6,})\.(jsonl|npz)(\.partial)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """A token sequence of a trajectory."""

    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    """Response tokens that the loss mask selects."""
    versions: list[tuple[int, int, int]]
    """The [start, end, global_steps] of the sampled response tokens."""
    turns: list[tuple[int, int]]
    """The [start, end) of the response tokens that the policy sampled in one go. The tokens between are an
    environment's."""
    turn_rewards: list[tuple[int, float, int]]
    """The [end, reward, number] of the turns of an episode that is rewarded by turns; `number` rewarded ones precede
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """A trajectory of a group."""

    ordinal: int
    """The prompt's identity in the stream."""
    index: int
    """Place in the prompt's group."""
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    reward: float
    reward_metrics: dict[str, float]
    """The other values that the reward reported: each term of a sum under its name."""
    agent_metrics: dict[str, float]
    """The values that the agent loop and its environment measured."""
    overlong_penalty: float
    error: str | None
    """The reason why there is no reward."""
    advantage: float | None
    """The advantage, or None in a group that was not trained."""
    sequences: list[SequenceRecord]
    """The token sequences: one, unless the episode has branches."""
    finish_reason: str
    replica: str
    began: float
    """The time at which the agent worker began the last attempt at the group, in seconds since the epoch."""
    generate_s: float
    """The seconds that its episode took in that attempt; `reward_s` are those of its reward. If the episodes of the
    group ran in one call, both are those of all of them."""
    reward_s: float
    tool_s: float = 0.0
    """The part of `generate_s` in which no request was at a replica: tools, environment, harness."""
    score_s: float = 0.0
    """The seconds that the teacher took for the group; 0 without one."""
    row: int | None = None
    """The number of the prompt's row in the data. None: the record is from before it was written."""
    source: str = ""
    """The prompt's source in data.sources; empty where the run has no such."""
    source_ordinal: int = 0
    """The prompt's place among those of its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """A sample of an evaluation."""

    ordinal: int
    """The prompt's place in the held-out set."""
    index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    accuracy: float
    answer: str | None
    """The answer that the reward read out of the response."""
    error: str | None
    versions: list[int]
    """`global_steps` of its tokens."""
    response_tokens: int
    source: str = ""
    """The prompt's source in data.sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardRecord:
    """A group that was not trained."""

    ordinal: int
    reason: str
    """The name of a `DiscardReason`."""
    error: str | None
    global_steps: int
    """Optimizer steps that had been recorded."""
    time: float
    """The time in seconds since the epoch."""
    trajectories: list[TrajectoryRecord]
    """Empty for a group that failed."""
    row: int | None = None
    """The number of the prompt's row in the data. None: the record is from before it was written."""
    source: str = ""
    """The prompt's source in data.sources; empty where the run has no such."""
    source_ordinal: int = 0
    """The prompt's place among those of its source."""


def trajectory_records(
    prompt: Prompt, trajectories: Sequence[Trajectory], advantages: Sequence[float | None]
) -> list[TrajectoryRecord]:
    return [
        TrajectoryRecord(
            ordinal=prompt.ordinal,
            index=index,
            data_source=prompt.data_source,
            prompt=prompt.text,
            response=trajectory.text,
            ground_truth=prompt.ground_truth,
            reward=trajectory.reward,
            reward_metrics=trajectory.reward_metrics,
            agent_metrics=trajectory.agent_metrics,
            overlong_penalty=trajectory.overlong_penalty,
            error=trajectory.error,
            advantage=None if advantage is None else round(float(advantage), 6),
            sequences=[_sequence_record(sequence) for sequence in trajectory.sequences],
            finish_reason=trajectory.finish_reason,
            replica=trajectory.replica,
            began=round(trajectory.began, 3),
            generate_s=round(trajectory.generate_s, 3),
            reward_s=round(trajectory.reward_s, 3),
            tool_s=round(trajectory.tool_s, 3),
            score_s=round(trajectory.score_s, 3),
            row=prompt.row,
            source=prompt.source,
            source_ordinal=prompt.source_ordinal,
        )
        for index, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True))
    ]


def _sequence_record(sequence: TokenSequence) -> SequenceRecord:
    return SequenceRecord(
        prompt_tokens=len(sequence.prompt_ids),
        response_tokens=len(sequence.response_ids),
        loss_tokens=int(sequence.loss_mask.sum()),
        versions=[(span.start, span.end, span.global_steps) for span in sequence.spans],
        turns=sampled_turns(sequence.spans),
        turn_rewards=[(turn.end, turn.reward, turn.number) for turn in sequence.turn_rewards],
    )


def sample_records(prompts: Iterable[EvaluatedPrompt]) -> list[SampleRecord]:
    return [
        SampleRecord(
            ordinal=prompt.ordinal,
            index=index,
            data_source=prompt.data_source,
            prompt=prompt.text,
            response=sample.response,
            ground_truth=prompt.ground_truth,
            accuracy=sample.accuracy,
            answer=sample.answer,
            error=sample.error,
            versions=sorted(sample.versions),
            response_tokens=sample.num_tokens,
            source=prompt.source,
        )
        for prompt in prompts
        for index, sample in enumerate(prompt.samples)
    ]


def discard_record(group: DiscardedGroup, global_steps: int) -> DiscardRecord:
    return DiscardRecord(
        ordinal=group.prompt.ordinal,
        reason=group.reason.name,
        error=group.error,
        global_steps=global_steps,
        time=round(time.time(), 3),
        trajectories=trajectory_records(group.prompt, group.trajectories, [None] * len(group.trajectories)),
        row=group.prompt.row,
        source=group.prompt.source,
        source_ordinal=group.prompt.source_ordinal,
    )


def to_lines(records: Iterable[TrajectoryRecord | SampleRecord | DiscardRecord]) -> bytes:
    """Return the records as lines of JSON. Half of a surrogate pair, which UTF-8 cannot hold, is written as JSON's own
    escape."""
    return b"".join(_line(record) + b"\n" for record in records)


def _line(record: TrajectoryRecord | SampleRecord | DiscardRecord) -> bytes:
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return json.dumps(asdict(record), ensure_ascii=False).encode("utf-8", "backslashreplace")


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of steps in a folder of records, each with its step, in order. Files of other names are a
    person's."""
    if not folder.is_dir():
        return []
    named = ((_STEP_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(name[1]), path) for name, path in named if name is not None)


def token_arrays(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray], tokens: TrainedTokens | None = None
) -> bytes:
    """Return the groups' tokens as a file for `numpy.load`.

    `format` is TOKEN_FORMAT, with kept tokens KEPT_FORMAT, and with routes ROUTED_FORMAT, or SHARED_ROUTES_FORMAT where
    sequences share those of their prompt. Of each trajectory, [B]:
    `ordinals`, `replicas`, `rewards`, `baselines` (the shaped reward of remax's greedy response, NaN where there is
    none), `advantages` and `num_sequences`. Of each of their sequences, [S]: `prompt_lengths` and `response_lengths`.
    The sequences' tokens are concatenated: `prompt_ids` [sum of prompt lengths]; `response_ids`, `loss_mask`,
    `rollout_logprobs`, `versions` and, with a teacher, `teacher_logprobs` [sum of response lengths]. Where sampling
    left tokens out, `kept_counts` [sum of response lengths] and `kept_ids`, the arrays of `KeptTokens`. Where the
    sampler said which experts it chose, `routes` [rows, layers, top_k], the rows of `Routes` of one sequence after the
    other, and `routed_lengths` [S]. Where groups have those of prompts once, the rows of a sequence begin with the
    `prompt_route_lengths` [S] rows of `prompt_routes` [rows, layers, top_k] from `prompt_route_starts` [S] on.
    Of `tokens`, if they are given, those that the loss mask selects, [T]: `trainer_logprobs` (NaN where the trainer
    computed none), `token_advantages`, `is_clipped`, `is_rejected` and, with algorithm.proximal=exact, `old_logprobs`.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    trained: dict[str, Any] = {}
    if tokens is not None:
        trained = {TRAINED[name]: array for name, array in tokens.arrays().items()}
    scores = [sequence.teacher_logprobs for sequence in sequences if sequence.teacher_logprobs is not None]
    if scores and len(scores) == len(sequences):
        trained["teacher_logprobs"] = join(scores, np.float32)
    kept = KeptTokens.concatenate([(sequence.kept, len(sequence.response_ids)) for sequence in sequences])
    if kept is not None:
        trained |= {"kept_counts": kept.counts, "kept_ids": kept.token_ids}
    trained |= _routes_to_record(sequences)
    file = BytesIO()
    np.savez(
        file,
        format=np.array(_format(trained)),
        ordinals=np.array([group.prompt.ordinal for group in groups for _ in group.trajectories]),
        replicas=np.array([trajectory.replica for trajectory in trajectories]),
        rewards=np.array([trajectory.reward for trajectory in trajectories]),
        baselines=np.array([_baseline(group) for group in groups for _ in group.trajectories]),
        advantages=join(list(advantages), np.float32),
        num_sequences=np.array([len(trajectory.sequences) for trajectory in trajectories]),
        prompt_lengths=np.array([len(sequence.prompt_ids) for sequence in sequences], np.int64),
        response_lengths=np.array([len(sequence.response_ids) for sequence in sequences], np.int64),
        prompt_ids=join([sequence.prompt_ids for sequence in sequences], np.int32),
        response_ids=join([sequence.response_ids for sequence in sequences], np.int32),
        loss_mask=join([sequence.loss_mask for sequence in sequences], np.bool_),
        rollout_logprobs=join([sequence.rollout_logprobs for sequence in sequences], np.float32),
        versions=join([sequence.token_versions() for sequence in sequences], np.int32),
        **trained,
    )
    return file.getvalue()


def _format(arrays: Mapping[str, Any]) -> int:
    if "prompt_routes" in arrays:
        return SHARED_ROUTES_FORMAT
    return ROUTED_FORMAT if "routes" in arrays else KEPT_FORMAT if "kept_counts" in arrays else TOKEN_FORMAT


def _routes_to_record(sequences: Sequence[TokenSequence]) -> dict[str, NDArray[Any]]:
    """Return the arrays of routes of `token_arrays`: those that several sequences share once."""
    routed = [sequence.routes.experts for sequence in sequences if sequence.routes is not None]
    if not routed:
        return {}
    lengths = [0 if sequence.routes is None else len(sequence.routes) for sequence in sequences]
    arrays = {"routes": np.concatenate(routed), "routed_lengths": np.array(lengths, np.int64)}
    starts: dict[int, int] = {}  # by the identity of what is shared
    shared: list[NDArray[np.unsignedinteger]] = []
    of_prompts = [None if sequence.prompt_routes is None else sequence.prompt_routes.experts for sequence in sequences]
    for experts in of_prompts:
        if experts is not None and id(experts) not in starts:
            starts[id(experts)] = sum(map(len, shared))
            shared.append(experts)
    if not shared:
        return arrays
    return arrays | {
        "prompt_routes": np.concatenate(shared),
        "prompt_route_starts": np.array([starts.get(id(experts), 0) for experts in of_prompts], np.int64),
        "prompt_route_lengths": np.array([each.num_prompt_routes for each in sequences], np.int64),
    }


def recorded_kept(arrays: Mapping[str, Any]) -> KeptTokens | None:
    """Return the kept tokens of all response tokens of a file of `token_arrays`. None: nothing was left out."""
    if "kept_counts" not in arrays:
        return None
    return KeptTokens(counts=arrays["kept_counts"], token_ids=arrays["kept_ids"])


class RecordedRoutes(NamedTuple):
    """The experts of the inputs of a sequence: `num_of_prompt` rows of its prompt's, and its own after them."""

    own: Routes | None
    of_prompt: Routes | None = None
    """One object for all sequences that share it."""
    num_of_prompt: int = 0

    def parts(self) -> list[NDArray[np.unsignedinteger]]:
        """Return the rows of all inputs, in their order."""
        first = [] if self.of_prompt is None else [self.of_prompt.experts[: self.num_of_prompt]]
        return [*first, *([] if self.own is None else [self.own.experts])]


def recorded_routes(arrays: Mapping[str, Any]) -> list[RecordedRoutes]:
    """Return the experts of the inputs of each sequence of a file of `token_arrays`, in any format."""
    none = np.zeros(len(arrays["prompt_lengths"]), np.int64)
    lengths = arrays.get("routed_lengths", none)
    starts, shared_lengths = arrays.get("prompt_route_starts", none), arrays.get("prompt_route_lengths", none)
    ends, experts, prompts = np.cumsum(lengths).tolist(), arrays.get("routes"), arrays.get("prompt_routes")
    most: dict[int, int] = {}  # the longest use of each part that is shared
    for start, count in zip(starts.tolist(), shared_lengths.tolist(), strict=True):
        most[start] = max(most.get(start, 0), count)
    shared = {
        start: Routes(experts=prompts[start : start + count]) for start, count in most.items() if prompts is not None
    }
    return [
        RecordedRoutes(None)
        if experts is None or not length + count
        else RecordedRoutes(Routes(experts=experts[end - length : end]), shared[start] if count else None, count)
        for length, end, start, count in zip(
            lengths.tolist(), ends, starts.tolist(), shared_lengths.tolist(), strict=True
        )
    ]


def _baseline(group: TrajectoryGroup) -> float:
    return group.greedy.shaped_reward if group.greedy is not None and group.greedy.is_scored else math.nan


def sampled_turns(spans: Iterable[VersionSpan]) -> list[tuple[int, int]]:
    """Return the [start, end) of each turn: the spans that follow one another without a gap are one."""
    turns: list[tuple[int, int]] = []
    for span in spans:
        start = turns.pop()[0] if turns and turns[-1][1] == span.start else span.start
        turns.append((start, span.end))
    return turns
