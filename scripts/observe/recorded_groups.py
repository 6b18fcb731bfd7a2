"""Read back the trajectory groups of a step, as they were trained: to the bit in all that training reads."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types import FloatArray, Prompt, TokenSequence, Trajectory, TrajectoryGroup, TurnReward, VersionSpan
from scripts.observe.files import RunError, read_arrays, slices
from scripts.observe.run import Run
from trainer.tracking.trajectories import (
    FORMATS,
    TRAINED,
    SequenceRecord,
    TrajectoryRecord,
    recorded_kept,
    recorded_routes,
)

OF_PROMPT = "prompt_ids"
OF_RESPONSE = ("response_ids", "loss_mask", "rollout_logprobs")
TEACHER = "teacher_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """A step as its records have it."""

    groups: tuple[TrajectoryGroup, ...]
    """The groups in the order of the batch. Their prompts lack the columns of the row that nothing trains on."""
    advantages: FloatArray | None
    """[T] the advantage of each loss token; None for a step that trained nothing."""
    logprobs: FloatArray | None
    """[T] the trainer's logprob of each, NaN where it computed none."""
    old_logprobs: FloatArray | None = None
    """[T] `TokenSignals.old_logprobs`, with algorithm.proximal=exact."""


def require_tokens(run: Run, step: int) -> None:
    """Look whether the tokens of a step can be read here, without reading them.

    Raises:
        RunError: they were not recorded, or in an older format.
    """
    with _of_step(run, step):
        has = int(read_arrays(run.tokens_path(step), ("format",)).get("format", 1))
    if has not in FORMATS:
        expected = f"a replay reads formats {min(FORMATS)} to {max(FORMATS)}"
        raise RunError(f"{run.folder.name}: step {step}: its tokens are recorded in format {has}, and {expected}")


@contextmanager
def _of_step(run: Run, step: int) -> Iterator[None]:
    """Turn errors of reading the files of a step into a RunError that names the step."""
    name = f"{run.folder.name}: step {step}"
    try:
        yield
    except FileNotFoundError as error:
        raise RunError(f"{name} has no records of its tokens (trainer.record_tokens): {error}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{name}: its records cannot be read: {error}") from error


def read_step(run: Run, step: int) -> RecordedStep:
    """Read what a step was trained on.

    Raises:
        RunError: it was not recorded, in an older format, or not as it was written.
    """
    name = f"{run.folder.name}: step {step}"
    require_tokens(run, step)
    with _of_step(run, step):
        read, arrays = run.trajectories(step), run.tokens(step)
    if read.problems:
        raise RunError(f"{name}: {run.trajectories_path(step).name}: {read.problems[0]}")
    try:
        groups = tuple(_groups(read.records, arrays))
    except (KeyError, ValueError, IndexError, StopIteration) as error:
        raise RunError(f"{name}: its .jsonl and its .npz do not belong together: {error}") from error
    return RecordedStep(
        groups=groups,
        advantages=arrays.get(TRAINED["advantages"]),
        logprobs=arrays.get(TRAINED["logprobs"]),
        old_logprobs=arrays.get(TRAINED["old_logprobs"]),
    )


def _groups(records: Sequence[TrajectoryRecord], arrays: dict[str, Any]) -> Iterator[TrajectoryGroup]:
    """Build the groups. Raise ValueError if records and arrays are not of the same trajectories."""
    lines = [(record.ordinal, len(record.sequences)) for record in records]
    if lines != list(zip(arrays["ordinals"].tolist(), arrays["num_sequences"].tolist(), strict=True)):
        raise ValueError("they list other trajectories")
    sequences = _sequences([sequence for record in records for sequence in record.sequences], arrays)
    rewards = iter(zip(arrays["rewards"].tolist(), arrays["baselines"].tolist(), strict=True))
    for _, members in groupby(records, key=lambda record: record.ordinal):
        some = list(members)
        parts = [tuple(next(sequences) for _ in record.sequences) for record in some]
        numbers = [next(rewards) for _ in some]
        trajectories = [_trajectory(*each) for each in zip(some, parts, (reward for reward, _ in numbers), strict=True)]
        yield TrajectoryGroup(
            prompt=_prompt(some[0], trajectories), trajectories=tuple(trajectories), greedy=_greedy(numbers[0][1])
        )


def _sequences(records: Sequence[SequenceRecord], arrays: dict[str, Any]) -> Iterator[TokenSequence]:
    lengths = [(record.prompt_tokens, record.response_tokens) for record in records]
    if lengths != list(zip(arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist(), strict=True)):
        raise ValueError("they list sequences of other lengths")
    names = [*OF_RESPONSE, *([TEACHER] if TEACHER in arrays else [])]
    of_prompts = _cut(arrays[OF_PROMPT], [length for length, _ in lengths])
    of_responses = [_cut(arrays[name], [length for _, length in lengths]) for name in names]
    kept, end = recorded_kept(arrays), 0
    routed = recorded_routes(arrays)
    for record, routes, prompt_ids, *parts in zip(records, routed, of_prompts, *of_responses, strict=True):
        start, end = end, end + record.response_tokens
        yield TokenSequence(
            prompt_ids=prompt_ids,
            spans=tuple(VersionSpan(*span) for span in record.versions),
            turn_rewards=tuple(TurnReward(*turn) for turn in record.turn_rewards),
            kept=None if kept is None else kept.cut(start, end),
            routes=routes.own,
            prompt_routes=routes.of_prompt,
            **dict(zip(names, parts, strict=True)),
        )


def _cut(array: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Return the parts of these lengths. Raises ValueError unless they are the whole."""
    if sum(lengths) != len(array):
        raise ValueError(f"{len(array)} tokens where the lengths say {sum(lengths)}")
    return [array[part] for part in slices(lengths)]


def _trajectory(record: TrajectoryRecord, sequences: tuple[TokenSequence, ...], reward: float) -> Trajectory:
    return Trajectory(
        sequences=sequences,
        reward=reward,
        finish_reason=record.finish_reason,
        text=record.response,
        replica=record.replica,
        reward_metrics=record.reward_metrics,
        agent_metrics=record.agent_metrics,
        overlong_penalty=record.overlong_penalty,
        error=record.error,
        began=record.began,
        generate_s=record.generate_s,
        reward_s=record.reward_s,
        tool_s=record.tool_s,
        score_s=record.score_s,
    )


def _prompt(record: TrajectoryRecord, trajectories: Sequence[Trajectory]) -> Prompt:
    first = next((sequence.prompt_ids for each in trajectories for sequence in each.sequences), np.empty(0, np.int32))
    return Prompt(
        ordinal=record.ordinal,
        row=record.row,
        text=record.prompt,
        token_ids=tuple(first.tolist()),
        ground_truth=record.ground_truth,
        data_source=record.data_source,
        source=record.source,
        source_ordinal=record.source_ordinal,
    )


def _greedy(baseline: float) -> Trajectory | None:
    """Return a trajectory with the reward of remax's greedy response, which is all that training reads of it."""
    if math.isnan(baseline):
        return None
    return Trajectory(sequences=(), reward=baseline, finish_reason="stop", text="", replica="")
