"""The objects that move from the rollouter to the trainer. Each moves forward once and is never changed.

Token sequences are numpy arrays, because Ray moves them between processes on one node without a copy.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.request_ids import RequestId

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
    """Other columns of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    max_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the sampling with finish_reason "stop", special tokens included. The token that completes one
    stays in the response, whole, with all before it."""
    ignore_eos: bool = False
    seed: int | None = None
    """Makes a request's sampling repeatable, whatever else the engine runs."""

    def __post_init__(self) -> None:
        """Raises TypeError and ValueError for what is no stop string."""
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise TypeError(f"stop={self.stop!r}: must be a tuple of texts, for example ('</answer>',)")
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r}: an empty text would stop everything; leave it out")

    def reseeded(self, *path: int) -> Self:
        """The same with a seed derived from `seed` and `path`, if there is a seed at all."""
        if self.seed is None:
            return self
        digest = hashlib.sha256("/".join(map(str, (self.seed, *path))).encode()).digest()
        return replace(self, seed=int.from_bytes(digest[:4], "big") >> 1)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) were sampled by the weights tagged `global_steps`.

    Example: [VersionSpan(0, 12, 4), VersionSpan(12, 30, 5)]: an update came after token 12.
    """

    start: int
    end: int
    global_steps: int


def shift_spans(spans: Iterable[VersionSpan], by: int) -> tuple[VersionSpan, ...]:
    """The spans `by` tokens further on. What would lie before token 0 is cut off."""
    return tuple(
        VersionSpan(max(span.start + by, 0), span.end + by, span.global_steps) for span in spans if span.end + by > 0
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A replica's answer to one request, or a part of it."""

    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T] of the sampling distribution: temperature, top-p and top-k are in it
    spans: tuple[VersionSpan, ...]
    """Cover what was sampled of [0, T) without overlap, versions ascending. An answer of a replica is all sampled."""
    finish_reason: str
    """"stop" (end-of-sequence or a stop string), "length" (max_tokens), "abort", or "" while the request runs."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Consecutive parts of one request, at least one."""
        if len(parts) == 1:
            return parts[0]
        spans: list[VersionSpan] = []
        offset = 0
        for part in parts:
            for span in shift_spans(part.spans, offset):
                if spans and (spans[-1].global_steps, spans[-1].end) == (span.global_steps, span.start):
                    span = replace(span, start=spans.pop().start)
                spans.append(span)
            offset += part.num_tokens
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            spans=tuple(spans),
            finish_reason=parts[-1].finish_reason,
            cached_tokens=parts[0].cached_tokens,
        )

    def after(self, start: int) -> Self:
        """Return the rest, without the first `start` tokens."""
        return replace(
            self,
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:],
            spans=shift_spans(self.spans, -start),
        )


EMPTY = Completion(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=(), finish_reason="")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request of an episode to a replica: token ids in, token ids out."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    partial: Completion | None = None
    """What has been sampled of it before. The replica answers with the whole."""
    is_continuation: bool = False
    """Whether an engine was at work on it before. Set by the replica: such a request takes a seat before new ones."""
    num_sampled: int = 0
    """How many tokens at the end of `prompt_ids` are the beginning of its own response. Set by the replica: a stop
    string may begin in them."""
    num_observed: int | None = None
    """How many tokens at the end of `prompt_ids` an environment said since the turn before, or, before the first turn,
    since the prompt. They are kept with what is sampled, for an episode that runs again. None: nobody keeps them."""

    @property
    def observed(self) -> IntArray | None:
        if self.num_observed is None:
            return None
        return np.array(self.prompt_ids[len(self.prompt_ids) - self.num_observed :], np.int32)


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward for what the policy did in a response up to token `end`, since the turn before.

    Example: (TurnReward(12, 0.5, 0), TurnReward(40, 1.0, 1)): tokens [0, 12) and [12, 40) are two turns with a reward
    each.
    """

    end: int
    reward: float
    number: int
    """How many rewarded turns of the episode precede it in time, those of other branches too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """One sequence that the model read and wrote: a linear episode is one, an episode with branches several.

    The prompt of a branch is all that precedes its own tokens, those of other sequences too, so that every sampled
    token is in the response of exactly one sequence.

    Example, a second turn that was sampled twice: (prompt=[p], response=[a o b]) and (prompt=[p a o], response=[c]).
    """

    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [R] sampled tokens, and between them tokens of the other side
    loss_mask: BoolArray  # [R] true where the policy sampled the token, or is given it to learn
    rollout_logprobs: FloatArray  # [R] behaviour logprobs, 0 where the policy did not sample the token
    spans: tuple[VersionSpan, ...]
    """Version spans over the sampled tokens of [0, R)."""
    teacher_logprobs: FloatArray | None = None
    """[R] the teacher's logprobs at temperature 1, 0 where the policy did not sample the token; None: not scored."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """By `end`, ascending, for an episode that is rewarded by turns. The trajectory's reward contains them. A turn that
    got none is one of 0, or belongs to the next."""

    @classmethod
    def of(cls, prompt_ids: Iterable[int], response: Completion, loss_mask: BoolArray | None = None) -> Self:
        """The sequence of a response. `loss_mask`: where the policy sampled it; everywhere if not given."""
        return cls(
            prompt_ids=np.fromiter(prompt_ids, np.int32),
            response_ids=response.token_ids,
            loss_mask=np.ones(response.num_tokens, np.bool_) if loss_mask is None else loss_mask,
            rollout_logprobs=response.logprobs,
            spans=response.spans,
        )

    @property
    def token_ids(self) -> IntArray:
        """[P + R]"""
        return np.concatenate([self.prompt_ids, self.response_ids])

    def token_versions(self) -> IntArray:
        """[R] `global_steps` of every token, -1 where the policy did not sample it."""
        versions = np.full(len(self.response_ids), -1, np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.global_steps
        return versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A finished episode with its reward."""

    sequences: tuple[TokenSequence, ...]
    """In the order in which they began; none if the policy was never asked."""
    reward: float
    """What the reward function gave, or the sum of what the environment gave; 0 where there is an `error`."""
    finish_reason: str
    """"stop", "length" (the response reached its limit of tokens or turns) or "abort"."""
    text: str
    """The response, decoded."""
    replica: str
    """Name of the replica that sampled it."""
    cached_tokens: int = 0
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """What the reward function reported besides the number."""
    agent_metrics: dict[str, float] = field(default_factory=dict)
    """What the agent loop and its environment measured."""
    overlong_penalty: float = 0.0
    """At most 0; below for a response near its limit. Not part of `reward`."""
    error: str | None = None
    """Why there is no reward."""
    began: float = 0.0
    """When the agent worker began the last attempt at its group, in seconds since the epoch."""
    generate_s: float = 0.0
    """How long its episode took in that attempt, and `reward_s` its reward; where the episodes of the group ran in one
    call, how long all of them took."""
    reward_s: float = 0.0
    score_s: float = 0.0
    """How long the teacher took for its group, waiting included; 0 without one."""

    @property
    def shaped_reward(self) -> float:
        """The reward that is learned from."""
        return self.reward + self.overlong_penalty

    @property
    def is_scored(self) -> bool:
        """Whether its reward says anything. A trajectory without one, or that a client aborted, is not trained and
        counts in no baseline."""
        return self.error is None and self.finish_reason != "abort"

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(len(sequence.response_ids) for sequence in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    @property
    def versions(self) -> frozenset[int]:
        """`global_steps` of its sampled tokens."""
        return frozenset(span.global_steps for sequence in self.sequences for span in sequence.spans)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """All `group_size` trajectories of one prompt: the unit of admission, buffering and advantages."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    """With remax: a greedy trajectory, not trained, whose reward is the baseline."""

    @property
    def errors(self) -> list[str | None]:
        """Why rewards failed; None for each that did not."""
        every = self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)
        return [trajectory.error for trajectory in every]

    @property
    def rewards_differ(self) -> bool:
        """False for a group that every group-relative advantage sets to 0. The overlong penalty does not count: a
        group is solved or not whatever its lengths (DAPO, arXiv:2503.14476, eq. 11)."""
        return len({trajectory.reward for trajectory in self.trajectories if trajectory.is_scored}) > 1

    @property
    def is_aborted(self) -> bool:
        """Whether a client aborted every trajectory, so that nothing is left to learn from."""
        return all(trajectory.finish_reason == "abort" for trajectory in self.trajectories)

    @property
    def is_taught(self) -> bool:
        """Whether a teacher has scored every trajectory."""
        return all(
            sequence.teacher_logprobs is not None
            for trajectory in self.trajectories
            for sequence in trajectory.sequences
        )

    @property
    def min_version(self) -> int:
        """`global_steps` of the oldest weights that sampled a token. ValueError where there is no token."""
        return min(version for trajectory in self.trajectories for version in trajectory.versions)

    @property
    def num_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)


class DiscardReason(Enum):
    filtered = "filtered"
    """All its rewards are equal (algorithm.filter_groups)."""
    stale = "stale"
    """It was too old to be trained (rollout.stale_policy=drop)."""
    aborted = "aborted"
    """A client aborted every trajectory."""
    unneeded = "unneeded"
    """The run ended without it: it was resumed with fewer steps."""
    failed = "failed"
    """Every attempt at it failed, or too many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiscardedGroup:
    """A prompt that was drawn and is not trained."""

    prompt: Prompt
    reason: DiscardReason
    trajectories: tuple[Trajectory, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSample:
    accuracy: float
    """0 where the reward failed."""
    answer: str | None
    """The answer that the reward read, normalized so that equal answers are equal strings; None if it read none."""
    num_tokens: int
    response: str = ""
    """Decoded."""
    versions: frozenset[int] = frozenset()
    """`global_steps` of its tokens: one version, unless an update came in between."""
    error: str | None = None
    """Why the reward failed."""
    agent_metrics: dict[str, float] = field(default_factory=dict)
    """What the agent loop and its environment measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPrompt:
    ordinal: int
    data_source: str
    samples: tuple[EvaluatedSample, ...]
    text: str = ""
    """The prompt as the model sees it, after the template."""
    ground_truth: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups of one step."""

    groups: tuple[TrajectoryGroup, ...]
    """By prompt ordinal, so the order of arrival cannot change the arithmetic."""
    masked_tokens: int
    """Response tokens left out of the loss because they were too old (stale policy `mask`)."""


def staleness(version: Version, global_steps: int, interval: int = 1) -> Version:
    """Versions between the weights that sampled a token and the weights that train it. The one meaning of staleness.

    Example: with an update every 3 steps, versions 0, 3, 6, ... are live: staleness(0, 5, interval=3) == 1.

    Args:
        version: tag of the weights that sampled the token, or an array of such tags.
        global_steps: steps taken before the one that trains it.
        interval: weight_sync.interval, steps per version.
    """
    return (global_steps - version) // interval
