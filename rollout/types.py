"""The objects that move from the rollouter to the trainer. Each moves forward once and is never changed.

Token sequences are numpy arrays, because Ray moves them between processes on one node without a copy.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Version = TypeVar("Version", int, IntArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of the prompt stream.

    Example: Prompt(ordinal=17, text="Question: 2 + 2?\\nAnswer: ", token_ids=(51, 8), ground_truth="4")
    """

    ordinal: int
    """Place in the stream, counted over all epochs: the prompt's identity, trained exactly once."""
    text: str
    """The prompt as the model sees it, after the template."""
    token_ids: tuple[int, ...]
    ground_truth: str
    """What the reward compares with."""
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row, for rewards of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a completion is sampled. temperature=0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    max_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """Makes one request's sampling repeatable, whatever runs beside it."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by the weights tagged `global_steps`.

    Example: [VersionSpan(0, 12, 4), VersionSpan(12, 30, 5)]: an update came after token 12.
    """

    start: int
    end: int
    global_steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What a replica answers to one request."""

    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T] of the sampling distribution: temperature, top-p and top-k are in it
    spans: tuple[VersionSpan, ...]
    """Cover [0, T) without gap or overlap, versions ascending."""
    finish_reason: str
    """"stop" (end-of-sequence), "length" (max_tokens) or "abort"."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One trajectory's request to a replica: token ids in, token ids out."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    so_far: Completion | None = None
    """What was sampled already, elsewhere: the replica goes on from there, and answers with the whole."""
    goes_on: bool = False
    """Set by `continuation.generate_through`: an earlier part of it was inside an engine, so that it takes a seat
    before those of which none was."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A finished episode with its reward: one training sequence."""

    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [R] sampled tokens, and tokens of an environment where there is one
    loss_mask: BoolArray  # [R] true where the policy sampled the token
    rollout_logprobs: FloatArray  # [R] behaviour logprobs, 0 where loss_mask is false
    spans: tuple[VersionSpan, ...]
    """Version spans over [0, R)."""
    reward: float
    """What the reward function gave; 0 where there is an `error`."""
    finish_reason: str
    """"stop", "length" (the response reached its limit of tokens or turns) or "abort"."""
    text: str
    """The response, decoded."""
    replica: str
    """Name of the replica that sampled it."""
    cached_tokens: int = 0
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """What the reward said beside the number."""
    overlong_penalty: float = 0.0
    """Of a response near its limit, 0 or less; not part of `reward`."""
    error: str | None = None
    """Why there is no reward."""

    @property
    def shaped_reward(self) -> float:
        """What is learned."""
        return self.reward + self.overlong_penalty

    @property
    def is_scored(self) -> bool:
        """Whether its reward says anything. One without a reward, or that somebody aborted, is not trained, and counts
        in no baseline."""
        return self.error is None and self.finish_reason != "abort"

    @property
    def min_version(self) -> int:
        """`global_steps` of the oldest weights that sampled a token. ValueError where there is no token."""
        return min(span.global_steps for span in self.spans)

    def token_versions(self) -> IntArray:
        """[R] `global_steps` of every token."""
        versions = np.empty(len(self.response_ids), np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.global_steps
        return versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """All `group_size` trajectories of one prompt: the unit of admission, buffering and advantages."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    """A greedy trajectory of the prompt, not trained, where the advantage compares with its reward (remax)."""

    @property
    def errors(self) -> list[str | None]:
        """Why rewards failed, None for each that did not."""
        every = self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)
        return [trajectory.error for trajectory in every]

    @property
    def rewards_differ(self) -> bool:
        """False for a group that every group-relative advantage sets to 0. The overlong penalty does not count: a
        group is solved or not whatever its lengths (DAPO, arXiv:2503.14476, eq. 11)."""
        return len({trajectory.reward for trajectory in self.trajectories if trajectory.is_scored}) > 1

    @property
    def is_aborted(self) -> bool:
        """Whether nothing is left of it to learn from: somebody aborted every trajectory."""
        return all(trajectory.finish_reason == "abort" for trajectory in self.trajectories)

    @property
    def min_version(self) -> int:
        """`global_steps` of the oldest weights that sampled a token. ValueError where there is no token."""
        return min(trajectory.min_version for trajectory in self.trajectories if trajectory.spans)

    @property
    def num_tokens(self) -> int:
        """Response tokens of the group."""
        return sum(len(trajectory.response_ids) for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups of one optimizer step, by prompt ordinal, so the order of arrival cannot change the arithmetic."""

    groups: tuple[TrajectoryGroup, ...]
    masked_tokens: int
    """Response tokens left out of the loss because they were too old (stale policy `mask`)."""


def staleness(version: Version, global_steps: int, interval: int = 1) -> Version:
    """Versions between the weights that sampled a token and the weights that train it. The one meaning of staleness.

    Example: with an update every 3 steps, versions 0, 3, 6, ... are live: staleness(0, 5, interval=3) == 1.

    Args:
        version: tag of the weights that sampled the token, or an array of such tags.
        global_steps: optimizer steps taken before the step that trains it.
        interval: weight_sync.interval, optimizer steps per version.
    """
    return (global_steps - version) // interval
