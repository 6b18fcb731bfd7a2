"""Compares every replica with the trainer, again and again, when both hold the same weights."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from configs.mixture import longest_source
from configs.runtime.deadline import within
from configs.schema import Config
from configs.validate import ConfigError
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.lifecycle import Replica, ReplicaState
from rollout.types import (
    Completion,
    FloatArray,
    Prompt,
    SamplingParams,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)
from scripts.launch.model_support import is_quantized
from trainer.batch import StepBatch, assemble_for
from trainer.replica_gap import MANY_TOKENS, ReplicaGap, refuse_other_replicas, replica_gaps
from trainer.tokens import sampled_tokens
from trainer.worker.recovery import RecoveringWorkers
from weight_sync.published import PublishedTensors, tensor_groups

NUM_TOKENS = MANY_TOKENS
"""The tokens that each replica samples at the start, after one prompt of the run."""
CANARY_TOKENS, NUM_PLACES = 64, 8
"""The length of the text that replicas are asked to continue after an update, and the number of places in it at which
they are asked: more than one block of a prefix cache, and few enough to cost nothing."""


class StalePrefixError(RuntimeError):
    """A replica has answered from the prefix cache of older weights."""


@dataclass(kw_only=True, eq=False)
class ReplicaCheck:
    """The comparison of replicas with the trainer (`trainer.ports.ReplicaCheck`).

    At the start, each replica samples tokens in a row, and the trainer computes their logprobs as it computes those of
    a batch. After an update that is due (weight_sync.check_every) neither waits for the other: right after its
    step the trainer computes log pi of every token in a few places of a fixed text, and when a replica serves those
    weights it samples one token in each of these places. It begins with the longest part of the text, which it has seen
    last under older weights: a prefix cache that gives anything for it is one of older weights.

    Replicas sample at rollout.temperature and from all tokens, whatever rollout.top_p says. What they sample is no
    part of the run: no record has it.

    Example:
        await check.compare(0)      # at the start, when nothing trains
        await check.remember(1)     # after the step, while the trainer has the weights of version 1
        await check.ask(1)          # once replicas serve it; the next step may be under way
    """

    config: Config
    fleet: ReplicaFleet
    workers: RecoveringWorkers
    publishing: asyncio.Lock
    """The lock that is held while the trainer's weights are read."""
    published: PublishedTensors
    """The tensors that were published: a difference names those that have not changed."""
    prompt: Prompt
    report: Callable[[str], None]
    """Takes a sentence on each replica that was compared at the start, or could not be compared yet."""
    num_requests: int = field(default=0, init=False)
    """The number of requests that the check has sent to replicas."""
    _compared: set[str] = field(default_factory=set, init=False)
    _gauges: dict[str, float] = field(default_factory=dict, init=False)
    _asking: set[str] = field(default_factory=set, init=False)
    """The replicas that are being asked: one that has not answered is not asked again."""
    _undecided: set[str] = field(default_factory=set, init=False)
    """The replicas that have not answered the last time in the version that was asked of: they may have computed the
    text in a later one, so that what the next request finds in the prefix cache may be of its own version."""
    _trainers: dict[int, FloatArray] = field(default_factory=dict, init=False)
    """Version -> log pi of every token in the places of the text, [NUM_PLACES, V]."""

    def __post_init__(self) -> None:
        tolerance, config = self.config.trainer.max_logprob_diff, self.config
        # Quantized weights compute other logprobs by design: they are compared only where the key allows a distance.
        quantizes = {"quantization", "quantization_config"}.intersection(config.rollout.engine_args)
        serves_others = config.model.lora.served_path is not None or bool(quantizes) or is_quantized(config)
        self._is_on = not serves_others if tolerance is None else tolerance != 0
        self._first: int | None = None

    # -- at the start --------------------------------------------------------------------------------------------------

    async def compare(self, global_steps: int) -> None:
        """Compare the replicas that serve the trainer's version, `global_steps`. The caller keeps the trainer at it.

        Raises:
            ConfigError: a replica computes other logprobs than the trainer.
        """
        self._first = global_steps
        if not self._is_on:
            return
        names = self._serving(global_steps)
        prompt_ids = self.prompt.token_ids[: max(1, self._max_tokens - NUM_TOKENS)]  # leaves room for the tokens
        num_tokens = min(NUM_TOKENS, self._max_tokens - len(prompt_ids))
        answers = await asyncio.gather(*(self._ask(name, [prompt_ids], num_tokens) for name in names))
        trajectories = tuple(
            _trajectory(name, prompt_ids, completion)
            for name, completions in zip(names, answers, strict=True)
            for completion in completions or ()
            if completion.num_tokens
        )
        if not trajectories:
            return
        groups = [TrajectoryGroup(prompt=self.prompt, trajectories=trajectories)]
        async with self.publishing:  # an update that wants the weights waits here, not in its deadline
            logprobs = await self.workers.logprobs(self._batch(groups, global_steps))
            await self._remember(global_steps)
        gaps = replica_gaps(groups, logprobs, global_steps)
        refuse_other_replicas(gaps, self.config, global_steps)
        for gap in gaps:
            apart = f"at most {gap.largest:.1g} nats apart over {gap.num_tokens} tokens"
            self.report(f"{gap.replica} computes the trainer's logprobs: {apart}")
        await self.ask(global_steps)  # which also leaves the text in the prefix cache, under this version

    @property
    def _max_tokens(self) -> int:
        return longest_source(self.config).context_tokens

    # -- after updates -------------------------------------------------------------------------------------------------

    def is_due(self, global_steps: int) -> bool:
        """Return whether the update to this version is one that is compared: the first of this process, every
        weight_sync.check_every-th, and the first that finds a replica which was not compared yet."""
        every, interval = self.config.weight_sync.check_every, self.config.weight_sync.interval
        if not self._is_on or self._first is None or global_steps % interval or global_steps == self._first:
            return False
        is_regular = every > 0 and (global_steps // interval % every == 0 or global_steps - self._first == interval)
        return is_regular or any(replica.name not in self._compared for replica in self._in_service())

    async def remember(self, global_steps: int) -> None:
        """Compute the trainer's side, if the update to this version is due. The caller keeps the trainer at it."""
        if self.is_due(global_steps):
            await self._remember(global_steps)

    async def _remember(self, global_steps: int) -> None:
        groups = [TrajectoryGroup(prompt=self.prompt, trajectories=(self._text_as_trajectory(),))]
        batch = self._batch(groups, global_steps)
        self._trainers[global_steps] = await self.workers.next_token_logprobs(batch)

    async def ask(self, global_steps: int) -> None:
        """Compare the replicas that serve a version of which the trainer's side is known. One that serves a newer one
        by the time that it answers, or does not answer, is compared at a later update.

        Raises:
            ConfigError: a replica computes other logprobs than the trainer.
            StalePrefixError: a replica has answered from the prefix cache of older weights.
        """
        logprobs = self._trainers.pop(global_steps, None)
        if logprobs is None:
            return
        names = [name for name in self._serving(global_steps) if name not in self._asking]
        self._asking.update(names)
        compared = await asyncio.gather(*(self._compared_after_update(name, logprobs, global_steps) for name in names))
        gaps = [gap for gap in compared if gap is not None]
        if gaps:
            self._gauges = {"weight_sync/logprob_diff": max(gap.mean for gap in gaps)}
        try:
            refuse_other_replicas(gaps, self.config, global_steps)
        except ConfigError as error:
            raise ConfigError(f"{error}. {self._suspects(global_steps)}") from None

    def gauges(self) -> dict[str, float]:
        """Return the metrics of what was compared since the last call."""
        gauges, self._gauges = self._gauges, {}
        return gauges

    async def _compared_after_update(self, name: str, logprobs: FloatArray, global_steps: int) -> ReplicaGap | None:
        """Return how far the replica is from the trainer's logprobs; None where it has not answered in this version."""
        try:
            completions = await self._continued(name)
        finally:
            self._asking.discard(name)
        may_judge_cache = name not in self._undecided
        if completions is None or any(_versions(each) != {global_steps} for each in completions):
            self._undecided.add(name)
            return None
        self._undecided.discard(name)
        self._compared.add(name)
        if may_judge_cache and (cached := completions[0].cached_tokens):
            raise StalePrefixError(
                f"{name} has taken {cached} tokens from its prefix cache in version {global_steps}, "
                "and nobody has computed them in that version: they are of older weights"
            )
        own = [logprobs[place, each.token_ids[0]] for place, each in enumerate(completions[::-1])]
        apart = np.abs(np.array(own) - np.array([each.logprobs[0] for each in completions[::-1]]))
        return ReplicaGap(name, len(apart), float(apart.mean()), float(apart.max()))

    async def _continued(self, name: str) -> list[Completion] | None:
        """Return the tokens that the replica samples at the places of the text, the last place first: each request
        alone, so that its cached tokens come from an earlier one."""
        text, (*others, longest) = self._text, self._places
        first = await self._ask(name, [text[:longest]], 1)
        rest = None if first is None else await self._ask(name, [text[:place] for place in reversed(others)], 1)
        return None if first is None or rest is None else [*first, *rest]

    def _suspects(self, global_steps: int) -> str:
        """Name the tensors that may be the cause."""
        unchanged = self.published.unchanged
        if unchanged and global_steps != self._first:
            since = f"Published without a change since version {min(unchanged.values())} or later"
            return f"{since}: {tensor_groups(sorted(unchanged))}; all others have changed"
        return (
            "Every published tensor has changed, and each replica has found the staged values live: what differs is "
            "how it loads or computes them, or its temperature"
        )

    @property
    def _text(self) -> tuple[int, ...]:
        """Return tokens that no request of the run begins with: the prompt backwards, from a token on that it does not
        begin with, and then forwards."""
        prompt_ids = self.prompt.token_ids
        backwards = prompt_ids[::-1]
        while backwards and backwards[0] == prompt_ids[0]:
            backwards = backwards[1:]
        both = (*(backwards or [1 - min(prompt_ids[0], 1)]), *prompt_ids)  # of one token only: 0, or 1
        length = min(CANARY_TOKENS, self._max_tokens - 1)
        return (both * (1 + length // len(both)))[:length]

    @property
    def _places(self) -> list[int]:
        """Return how many tokens of the text precede each place, ascending."""
        length = len(self._text)
        return sorted({max(1, length * number // NUM_PLACES) for number in range(1, NUM_PLACES + 1)})

    def _text_as_trajectory(self) -> Trajectory:
        """Return a trajectory whose loss tokens are in the places of the text, so that it is computed as any other."""
        text, places = self._text, self._places
        first, length = places[0], len(text) - places[0] + 1
        loss_mask = np.zeros(length, np.bool_)
        loss_mask[[place - first for place in places]] = True
        sequence = TokenSequence(
            prompt_ids=np.array(text[:first], np.int32),
            response_ids=np.array([*text[first:], text[0]], np.int32),  # the last place is before some token
            loss_mask=loss_mask,
            rollout_logprobs=np.zeros(length, np.float32),
            spans=(),
        )
        return Trajectory(sequences=(sequence,), reward=0.0, finish_reason="stop", text="", replica="")

    # -- both ----------------------------------------------------------------------------------------------------------

    def _batch(self, groups: list[TrajectoryGroup], global_steps: int) -> StepBatch:
        tokens = sampled_tokens(groups, global_steps)
        return assemble_for(self.config.trainer, groups, tokens, keep_idle=True)

    def _in_service(self) -> list[Replica]:
        return [replica for replica in self.fleet.replicas.values() if replica.state is ReplicaState.READY]

    def _serving(self, global_steps: int) -> list[str]:
        return [replica.name for replica in self._in_service() if replica.version == global_steps]

    async def _ask(self, name: str, prompts: list[tuple[int, ...]], num_tokens: int) -> list[Completion] | None:
        """Return the completion that the replica samples after each of these prompts; None if the replica is lost, or
        does not answer in time."""
        rollout = self.config.rollout
        sampling = SamplingParams(
            temperature=rollout.temperature, max_tokens=num_tokens, ignore_eos=True, seed=self.config.seed
        )
        handle = self.fleet.replicas[name].handle
        assert handle is not None
        what = f"sampling {num_tokens} tokens on {name}"
        try:
            async with within(rollout.start_timeout_s, "rollout.start_timeout_s", what):
                self.num_requests += len(prompts)
                return await asyncio.gather(*(handle.sample(prompt_ids, sampling) for prompt_ids in prompts))
        except Exception as error:  # whether the replica is lost is for the fleet's monitor to decide
            self.report(f"{name} was not compared with the trainer, and is after a later update: {error!r}")
            return None


def _versions(completion: Completion) -> set[int]:
    return {span.global_steps for span in completion.spans}


def _trajectory(replica: str, prompt_ids: tuple[int, ...], completion: Completion) -> Trajectory:
    return Trajectory(
        sequences=(TokenSequence.of(prompt_ids, completion),),
        reward=0.0,
        finish_reason=completion.finish_reason,
        text="",
        replica=replica,
    )
