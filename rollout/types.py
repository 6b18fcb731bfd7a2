"""The objects that move from the rollouter to the trainer. Each moves forward once and is never changed.

Token sequences are numpy arrays, because Ray moves them between processes on one node without a copy.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
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
    row: int | None = None
    """The number of its row among those of the data that are not too long. None: it is not of the stream."""
    text: str
    """The prompt as the model sees it, after the template."""
    token_ids: tuple[int, ...]
    ground_truth: str
    """The answer that the reward compares with."""
    data_source: str = ""
    """The data set that the row says it is from, which evaluations are reported by."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row."""
    source: str = ""
    """The name of its source in data.sources; empty where a run has no such."""
    source_ordinal: int = 0
    """Place among the prompts of its source, where a run has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Tokens below this share of the most likely one's probability are left out."""
    max_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the sampling with finish_reason "stop", special tokens included. The token that completes one
    stays in the response, whole, with all before it."""
    ignore_eos: bool = False
    seed: int | None = None
    """Makes a request's sampling repeatable, whatever else the engine runs."""

    def __post_init__(self) -> None:
        """Check stop strings. Raises TypeError and ValueError."""
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise TypeError(f"stop={self.stop!r}: must be a tuple of texts, for example ('</answer>',)")
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r}: an empty text would stop everything; leave it out")

    @property
    def truncates(self) -> bool:
        """Return whether it leaves tokens of the vocabulary out of what is drawn from."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)

    def reseeded(self, *path: int) -> Self:
        """Return the same with a seed derived from `seed` and `path`, if there is a seed at all."""
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
    """Return the spans `by` tokens further on. What would lie before token 0 is cut off."""
    return tuple(
        VersionSpan(max(span.start + by, 0), span.end + by, span.global_steps) for span in spans if span.end + by > 0
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTokens:
    """The tokens that top-p, top-k and min-p left to draw from, for each of T tokens, in compressed sparse rows.

    Whoever computes the probability of a sampled token normalizes over these: it was drawn from nothing else.

    Example, three tokens, of which the second was drawn from the whole vocabulary:
        counts     2   0  3
        token_ids  4 9    1 4 7
    """

    counts: IntArray  # [T] how many were left; 0 all of the vocabulary; UNKNOWN
    token_ids: IntArray  # [sum of the counts above 0] ascending in each row

    @classmethod
    def all(cls, num_tokens: int) -> Self:
        """Return those of tokens that were drawn from the whole vocabulary, or by nobody."""
        return cls(counts=np.zeros(num_tokens, np.int32), token_ids=np.empty(0, np.int32))

    @classmethod
    def concatenate(cls, parts: Sequence[tuple[Self | None, int]]) -> Self | None:
        """Join the parts, each with its number of tokens. None, alone and in a part: nothing was left out."""
        if all(part is None for part, _ in parts):
            return None
        whole = [cls.all(num_tokens) if part is None else part for part, num_tokens in parts]
        return cls(
            counts=np.concatenate([part.counts for part in whole]),
            token_ids=np.concatenate([part.token_ids for part in whole]),
        )

    @property
    def is_known(self) -> BoolArray:
        """[T] False where the engine could not say what was left."""
        return self.counts != UNKNOWN

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[T] the lengths of the rows."""
        return np.maximum(self.counts, 0).astype(np.int64)

    def offsets(self) -> NDArray[np.int64]:
        """[T + 1] the place of each row in `token_ids`, and the end of the last."""
        return np.concatenate([np.zeros(1, np.int64), self.lengths.cumsum()])

    def cut(self, start: int, end: int) -> Self:
        """Return those of the tokens [start, end)."""
        first, last = self.offsets()[[start, end]].tolist()
        return replace(self, counts=self.counts[start:end], token_ids=self.token_ids[first:last])

    def take(self, index: NDArray[np.integer]) -> Self:
        """Return those of the tokens at `index`."""
        lengths = self.lengths[index]
        shift = self.offsets()[:-1][index] - (lengths.cumsum() - lengths)
        places = np.repeat(shift, lengths) + np.arange(lengths.sum())
        return replace(self, counts=self.counts[index], token_ids=self.token_ids[places])

    def checksums(self) -> NDArray[np.uint32]:
        """[T] a number for each row that tells it from others: 0 for the whole vocabulary."""
        data, ends = self.token_ids.astype("<i4").tobytes(), (4 * self.offsets()).tolist()
        counts = self.counts.astype("<i4").tobytes()
        rows = enumerate(zip(ends[:-1], ends[1:], strict=True))
        numbers = [zlib.crc32(data[first:last], zlib.crc32(counts[4 * t : 4 * t + 4])) for t, (first, last) in rows]
        return np.where(self.counts == 0, np.uint32(0), np.array(numbers, np.uint32))


UNKNOWN = -1
"""The count of a token of which the engine could not say what was left: it is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The experts that the sampler's routers chose for each of N inputs, layer by layer. The trainer's routers choose
    the same again: by themselves, because they round otherwise, they would send some elsewhere.

    The token at the end of a sequence is no input yet. So of a completion, or of a sequence, the last row is that of
    the input from which its last token was predicted. Further ones lie before it, as far as they are known.

    Example, two inputs, one layer and the two best of 8 experts; nobody saw where the second was sent:
        experts  [[[3 5]] [[255 255]]]
    """

    experts: NDArray[np.unsignedinteger]
    """[N, layers, top_k] in one byte each, or two where there are more than 256 experts. A row of the type's largest
    number is unknown; a layer without a router has any."""

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def is_known(self) -> BoolArray:
        """[N] False where a router has to choose by itself."""
        return (self.experts != unknown_expert(self.experts.dtype)).any(axis=(1, 2))

    def last(self, num_inputs: int) -> Self:
        """Return the last rows."""
        return replace(self, experts=self.experts[max(len(self) - num_inputs, 0) :])

    def first(self, num_inputs: int) -> Self:
        """Return the first rows."""
        return replace(self, experts=self.experts[:num_inputs])

    def where(self, is_kept: BoolArray) -> Self:
        """[N] Return the rows, unknown where False."""
        unknown = np.array(unknown_expert(self.experts.dtype), self.experts.dtype)
        return replace(self, experts=np.where(is_kept[:, None, None], self.experts, unknown))

    @classmethod
    def placed(cls, parts: Sequence[tuple[Self | None, slice | NDArray[np.integer]]], num_inputs: int) -> Self | None:
        """Put the rows of each part at its places among `num_inputs`. The first part that knows a row counts. None: no
        part has any."""
        known = [(part, places) for part, places in parts if part is not None]
        if not known:
            return None
        some = known[0][0].experts
        whole = np.full((num_inputs, *some.shape[1:]), unknown_expert(some.dtype), some.dtype)
        for part, places in reversed(known):
            whole[places] = np.where(part.is_known[:, None, None], part.experts, whole[places])
        return cls(experts=whole)

    @classmethod
    def concatenate(cls, parts: Sequence[tuple[Self | None, int]]) -> Self | None:
        """Join those of consecutive tokens, each part with its number of tokens. What an earlier part knows counts: a
        request that goes on elsewhere, on keys and values computed anew, keeps the rows of its first attempt. Unknown
        ones, such as those of what an environment said, come from the part after, whose prompt they are in."""
        ends = np.cumsum([num_tokens for _, num_tokens in parts]).tolist()
        pairs = [(part, end) for (part, _), end in zip(parts, ends, strict=True) if part is not None]
        begin = min([0, *(end - len(part) for part, end in pairs)])
        num_inputs = ends[-1] - begin
        if len(pairs) == 1 and len(pairs[0][0]) == num_inputs:
            return pairs[0][0]
        return cls.placed([(part, slice(end - begin - len(part), end - begin)) for part, end in pairs], num_inputs)

    def num_equal(self, other: Self) -> int:
        """Return the number of rows, from the first on, that are those of the other."""
        length = min(len(self), len(other))
        differs = (self.experts[:length] != other.experts[:length]).any(axis=(1, 2))
        return int(differs.argmax()) if differs.any() else length

    def of_inputs(self, num_inputs: int) -> Self:
        """Return the rows of all inputs of a sequence: unknown ones before the first that is here."""
        whole = type(self).concatenate([(self, num_inputs)])
        assert whole is not None and len(whole) == num_inputs
        return whole


def unknown_expert(dtype: np.dtype[np.unsignedinteger]) -> int:
    """Return the number that fills the rows of `Routes` that are unknown."""
    return int(np.iinfo(dtype).max)


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
    kept: KeptTokens | None = None
    """The tokens that each was drawn from. None: all from the whole vocabulary."""
    routes: Routes | None = None
    """The experts of the inputs that the tokens were predicted from, and of the prompt's before them. None: there are
    no experts, or the engine does not say."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def unsampled(cls, token_ids: IntArray) -> Self:
        """Return tokens that no policy sampled: logprob 0 and no version."""
        return cls(token_ids=token_ids, logprobs=np.zeros(len(token_ids), np.float32), spans=(), finish_reason="")

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
            kept=KeptTokens.concatenate([(part.kept, part.num_tokens) for part in parts]),
            routes=Routes.concatenate([(part.routes, part.num_tokens) for part in parts]),
        )

    def after(self, start: int) -> Self:
        """Return the rest, without the first `start` tokens."""
        return replace(
            self,
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:],
            spans=shift_spans(self.spans, -start),
            kept=None if self.kept is None else self.kept.cut(min(start, self.num_tokens), self.num_tokens),
            routes=self.routes if start == 0 or self.routes is None else self.routes.last(self.num_tokens - start),
        )


EMPTY = Completion(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=(), finish_reason="")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request of an episode to a replica: token ids in, token ids out."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    partial: Completion | None = None
    """The tokens sampled of it before. The replica answers with the whole."""
    is_continuation: bool = False
    """True where an engine was at work on it before. Set by the replica: such a request takes a seat before new
    ones."""
    num_sampled: int = 0
    """The number of tokens at the end of `prompt_ids` that are the beginning of its own response. Set by the replica: a
    stop string may begin in them."""
    num_observed: int | None = None
    """The number of tokens at the end of `prompt_ids` that an environment said since the turn before, or, before the
    first turn, since the prompt. They are kept with what is sampled, for an episode that runs again. None: nobody keeps
    them."""
    reports_whole: bool = False
    """True where another request has taken the tokens that are known of this one: its replica reports all that it has,
    and not what comes after those."""
    num_routed: int = 0
    """The number of tokens at the beginning of `prompt_ids` whose `Routes` need not be sent: whoever asks has them."""

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
    """The number of rewarded turns of the episode that precede it in time, those of other branches too."""


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
    kept: KeptTokens | None = None
    """[R] the tokens that each was drawn from. None: all from the whole vocabulary."""
    routes: Routes | None = None
    """The experts of its inputs, of all tokens but the last; the first ones may be missing, or be in `prompt_routes`.
    None: all are unknown."""
    prompt_routes: Routes | None = None
    """The experts of its first inputs, of which those before `routes` are its own: one object for all sequences of a
    group that sent their prompt to the same experts, so that it travels and is stored once. None: `routes` has all."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """The rewards of turns, ascending by `end`, for an episode that is rewarded by turns. The trajectory's reward
    contains them. A turn that got none is one of 0, or belongs to the next."""

    @classmethod
    def of(cls, prompt_ids: Iterable[int], response: Completion, loss_mask: BoolArray | None = None) -> Self:
        """Make the sequence of a response. `loss_mask` says where the policy sampled it, by default everywhere. Tokens
        of which nobody knows what they were drawn from are left out of the loss."""
        loss_mask = np.ones(response.num_tokens, np.bool_) if loss_mask is None else loss_mask
        return cls(
            prompt_ids=np.fromiter(prompt_ids, np.int32),
            response_ids=response.token_ids,
            loss_mask=loss_mask if response.kept is None else loss_mask & response.kept.is_known,
            rollout_logprobs=response.logprobs,
            spans=response.spans,
            kept=response.kept,
            routes=response.routes,
        )

    @property
    def token_ids(self) -> IntArray:
        """[P + R]"""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def num_inputs(self) -> int:
        """Return the number of tokens that another one follows."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def num_prompt_routes(self) -> int:
        """Return the number of its inputs whose experts are in `prompt_routes`."""
        return 0 if self.prompt_routes is None or self.routes is None else self.num_inputs - len(self.routes)

    @property
    def routes_in_parts(self) -> list[Routes]:
        """Return the experts of its inputs in their order, without a copy. The first ones may be missing."""
        if self.routes is None:
            return []
        shared = [] if self.prompt_routes is None else [self.prompt_routes.first(self.num_prompt_routes)]
        return [*shared, self.routes]

    @property
    def input_routes(self) -> Routes | None:
        """Return the experts of its inputs as one. None: all are unknown."""
        parts = self.routes_in_parts
        if len(parts) < 2:
            return self.routes
        return Routes(experts=np.concatenate([part.experts for part in parts]))

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
    """The value that the reward function gave, or the sum of what the environment gave; 0 where there is an `error`."""
    finish_reason: str
    """"stop", "length" (the response reached its limit of tokens or turns) or "abort"."""
    text: str
    """The response, decoded."""
    replica: str
    """Name of the replica that sampled it."""
    cached_tokens: int = 0
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics that the reward function reported besides the number."""
    agent_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the agent loop and its environment."""
    overlong_penalty: float = 0.0
    """The penalty for a response near its limit: 0 or below. It is not part of `reward`."""
    error: str | None = None
    """Why there is no reward."""
    began: float = 0.0
    """The time at which the agent worker began the last call for its group, in seconds since the epoch, by the driver's
    clock."""
    generate_s: float = 0.0
    """Seconds that its episode took in that call, and `reward_s` its reward; where the episodes of the group ran in one
    call, how long all of them took."""
    reward_s: float = 0.0
    tool_s: float = 0.0
    """The part of `generate_s` in which no request was at a replica: tools, environment, harness."""
    score_s: float = 0.0
    """Seconds that the teacher took for its group, waiting included; 0 without one."""

    @property
    def shaped_reward(self) -> float:
        """Return the reward that is learned from."""
        return self.reward + self.overlong_penalty

    @property
    def largest_reward(self) -> float:
        """Return the size of the largest number that its reward was added up from: sums are exact to `ROUNDING` of
        it."""
        turns = (turn.reward for sequence in self.sequences for turn in sequence.turn_rewards)
        return max(map(abs, (self.reward, self.overlong_penalty, *turns)))

    @property
    def is_scored(self) -> bool:
        """Return whether its reward says anything. A trajectory without one, or that a client aborted, is not trained
        and counts in no baseline."""
        return self.error is None and self.finish_reason != "abort"

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all responses."""
        return sum(len(sequence.response_ids) for sequence in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    @property
    def versions(self) -> frozenset[int]:
        """Return the versions of its sampled tokens."""
        return frozenset(span.global_steps for sequence in self.sequences for span in sequence.spans)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """All `group_size` trajectories of one prompt: the unit of admission, buffering and advantages."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    """The greedy trajectory of remax, not trained, whose reward is the baseline."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """Return the sequences of all trajectories, in order."""
        return [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]

    @property
    def errors(self) -> list[str | None]:
        """Why rewards failed; None for each that did not, and for what a client aborted: half an episode may have
        none."""
        every = self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)
        return [None if trajectory.finish_reason == "abort" else trajectory.error for trajectory in every]

    @property
    def rewards_differ(self) -> bool:
        """False for a group of equal rewards, which grpo and its kin set to 0. The overlong penalty does not count: a
        group is solved or not whatever its lengths (DAPO, arXiv:2503.14476, eq. 11)."""
        rewards = self.rewards
        largest = (trajectory.largest_reward for trajectory in self.trajectories if trajectory.is_scored)
        rounding = ROUNDING * max(largest, default=0.0)
        return max(rewards, default=0.0) - min(rewards, default=0.0) > rounding

    def with_shared_routes(self) -> Self:
        """Return the group with the experts of the prompt once, as the first sequence has them. A sequence that other
        weights, or another rounding, sent elsewhere from some input on has its own from there on: what each was sent to
        does not change. The greedy trajectory is not trained and has none."""
        of_prompts = (
            sequence.routes.first(len(sequence.prompt_ids))
            for sequence in self.sequences
            if sequence.routes is not None and len(sequence.routes) == sequence.num_inputs
        )
        if (shared := next(of_prompts, None)) is None:
            return self
        trajectories = (
            replace(trajectory, sequences=tuple(_sharing(sequence, shared) for sequence in trajectory.sequences))
            for trajectory in self.trajectories
        )
        greedy = self.greedy
        if greedy is not None:
            greedy = replace(greedy, sequences=tuple(replace(each, routes=None) for each in greedy.sequences))
        return replace(self, trajectories=tuple(trajectories), greedy=greedy)

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the trajectories that have one."""
        return [trajectory.reward for trajectory in self.trajectories if trajectory.is_scored]

    @property
    def is_aborted(self) -> bool:
        """Return whether a client aborted every trajectory, so that nothing is left to learn from."""
        return all(trajectory.finish_reason == "abort" for trajectory in self.trajectories)

    @property
    def is_taught(self) -> bool:
        """Return whether a teacher has scored every trajectory."""
        return all(sequence.teacher_logprobs is not None for sequence in self.sequences)

    @property
    def min_version(self) -> int:
        """Return the tag of the oldest weights that sampled a token. Raises ValueError where there is no token."""
        return min(version for trajectory in self.trajectories for version in trajectory.versions)

    @property
    def num_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)


def _sharing(sequence: TokenSequence, shared: Routes) -> TokenSequence:
    """Return the sequence without the first rows that are those of `shared`, if there are any."""
    routes = sequence.routes
    if routes is None or len(routes) != sequence.num_inputs or routes.experts.shape[1:] != shared.experts.shape[1:]:
        return sequence
    count = shared.num_equal(routes)
    return replace(sequence, routes=routes.last(len(routes) - count), prompt_routes=shared) if count else sequence


ROUNDING = 1e-12
"""The share of the largest summand up to which two sums of rewards are one number: 0.1 + 0.2 is 0.3."""


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
    """Why the reward failed. None where it did not, and for an episode that a client aborted."""
    agent_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the agent loop and its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPrompt:
    ordinal: int
    data_source: str
    samples: tuple[EvaluatedSample, ...]
    text: str = ""
    """The prompt as the model sees it, after the template."""
    ground_truth: str = ""
    source: str = ""
    """The name of its source in data.sources."""

    @property
    def reported_as(self) -> list[str]:
        """Return the names under which its scores are reported: of its data set, or, where a run has several sources,
        of its source and of the data set in it."""
        if not self.source:
            return [self.data_source]
        return [self.source, *([f"{self.source}/{self.data_source}"] if self.data_source else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups of one step."""

    groups: tuple[TrajectoryGroup, ...]
    """The groups by prompt ordinal, so the order of arrival cannot change the arithmetic."""
    masked_tokens: int
    """Response tokens left out of the loss because they were too old (stale policy `mask`)."""
    trained: Mapping[str, int] = field(default_factory=dict)
    """The groups of each source of data.sources in all batches of the run up to this one."""


def staleness(version: Version, global_steps: int, interval: int = 1) -> Version:
    """Return the versions between the weights that sampled a token and the weights that train it. The one meaning of
    staleness.

    Every version that went live after the token's weights counts. A replica that catches up between two updates serves
    weights with a tag between theirs, which are no newer for this than the version that was live then.

    Example: with an update every 3 steps, versions 0, 3, 6, ... are live: staleness(0, 5, interval=3) == 1, and
    staleness(2, 6, interval=3) == 2, because 3 and 6 went live since.

    Args:
        version: tag of the weights that sampled the token, or an array of such tags.
        global_steps: steps taken before the one that trains it.
        interval: weight_sync.interval, steps per version.
    """
    return global_steps // interval - version // interval
