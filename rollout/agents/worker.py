"""Runs agent loops and rewards, away from the driver's event loop. `worker_group.py` puts it into Ray actors."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from configs.schema import Config
from rollout.agents.loop import AgentLoop, Ends, Episode, EpisodeTask, GenerateGroup, GroupLoop, is_replayable
from rollout.agents.relay import Relay
from rollout.errors import EpisodesLostError, NoTokensError
from rollout.events.event import finite
from rollout.events.kinds import EpisodeEnded, EpisodeStarted, RewardEnded, RewardStarted
from rollout.events.log import SILENT, EventLog
from rollout.progress import Attempt
from rollout.request_ids import RequestId
from rollout.rewards.base import RewardResult
from rollout.rewards.dapo import overlong_penalty
from rollout.rewards.outcome import settled
from rollout.rewards.scoring import RewardScorer
from rollout.router import ReplicaRouter, max_inflight
from rollout.types import (
    EvaluatedPrompt,
    EvaluatedSample,
    Prompt,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """An episode with its reward."""

    episode: Episode
    text: str
    result: RewardResult
    """The environment's, or else the reward's."""
    began: float
    """When its call began, in seconds since the epoch."""
    generate_s: float
    reward_s: float


OnOpen = Callable[[int], None]
"""Told how many episodes of a group are open, when an attempt begins and whenever one has ended."""


@dataclass(slots=True)
class _UnderWay:
    """A group under way."""

    relay: Relay
    on_open: OnOpen
    """Of the present attempt."""
    num_open: int
    task: asyncio.Task[list[_Scored]] = field(init=False)

    def end(self, count: int) -> None:
        """So many episodes more have ended. Their rewards are still to come, which need no room on a replica."""
        self.num_open -= count
        self.on_open(self.num_open)


@dataclass(kw_only=True)
class AgentWorker:
    """Runs episodes on replicas, and scores them.

    Example:
        worker.replicas["replica-3"] = generate
        group = await worker.run_group(prompt, "replica-3", sampling, 8, Attempt(), on_open=print)
    """

    config: Config
    tokenizer: Any
    """A tokenizer of transformers."""
    loop: AgentLoop
    scorer: RewardScorer
    replicas: dict[str, GenerateGroup]
    """Those that it generates on. More may be added."""
    events: EventLog = SILENT
    """What happens here, for the driver."""
    _waiting: dict[int, tuple[_UnderWay, asyncio.TimerHandle]] = field(default_factory=dict, init=False)
    """By ordinal: groups that have lost their replica, and when they are given up."""

    async def run_group(
        self,
        prompt: Prompt,
        replica: str,
        sampling: SamplingParams,
        group_size: int,
        attempt: Attempt,
        *,
        on_open: OnOpen,
    ) -> TrajectoryGroup:
        """Run and score all episodes of the prompt on one replica; with remax a greedy one besides.

        Raises ReplicaLostError. The episodes wait then, for rollout.group_timeout_s at most, for the next attempt to
        bring them another replica. Raises EpisodesLostError, and NoTokensError.

        A later attempt in another process, or in a run that is resumed, runs the agent loop from its beginning, and its
        requests are answered with what was sampled before: an environment gets back into its state by hearing the same
        turns. The policy hears what the environment said before, and not what it says now. Where nothing of that was
        recorded, and it answers otherwise, the trajectory is sampled anew from there.
        """
        group = self._take_waiting(prompt.ordinal)
        if group is None:
            if attempt.partials and not is_replayable(self.config):
                raise EpisodesLostError(f"the episodes of prompt {prompt.ordinal} that waited for {replica} are gone")
            episodes = self._episodes(prompt, sampling, group_size, attempt)
            relay = Relay(self.replicas[replica], attempt)
            group = _UnderWay(relay, on_open, len(episodes))
            scorer = self.scorer.of_group()
            group.task = asyncio.create_task(self._run(episodes, relay, group.end, replica, scorer))
        else:
            group.on_open = on_open
            group.relay.move(self.replicas[replica], attempt)
        on_open(group.num_open)
        scored = await self._until_lost(prompt.ordinal, group)
        trajectories = tuple(self._trajectory(replica, some) for some in scored)
        done = TrajectoryGroup(
            prompt=prompt,
            trajectories=trajectories[:group_size],
            greedy=trajectories[group_size] if len(trajectories) > group_size else None,
        )
        if not done.is_aborted and not any(trajectory.versions for trajectory in done.trajectories):
            raise NoTokensError(self._no_tokens(done))
        return done

    async def close(self) -> None:
        """The run has ended."""
        if isinstance(self.loop, Ends):
            await self.loop.close()

    def drop(self, ordinal: int) -> None:
        """End the episodes of a group that wait for a replica: its next attempt runs elsewhere. Idempotent."""
        if (waiting := self._take_waiting(ordinal)) is not None:
            waiting.task.cancel()

    def _take_waiting(self, ordinal: int) -> _UnderWay | None:
        group, expires = self._waiting.pop(ordinal, (None, None))
        if expires is not None:
            expires.cancel()
        return group

    def _expire(self, ordinal: int) -> None:
        timeout_s = self.config.rollout.group_timeout_s
        logger.warning(
            "prompt %d: no replica came within rollout.group_timeout_s=%g; its episodes end", ordinal, timeout_s
        )
        self.drop(ordinal)

    def _no_tokens(self, group: TrajectoryGroup) -> str:
        rollout = self.config.rollout
        loop = rollout.agent or rollout.agent_command or rollout.agent_loop
        error = next((error for error in group.errors if error is not None), None)
        why = "" if error is None else f"; the first failed with {error}"
        return f"prompt {group.prompt.ordinal}: none of its episodes has a token that the policy sampled in {loop}{why}"

    async def _until_lost(self, ordinal: int, group: _UnderWay) -> list[_Scored]:
        """What the group's task returns. When its replica is lost, the task is left waiting, and the error raised."""
        lost = group.relay.lost
        try:
            await asyncio.wait({group.task, lost}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            group.task.cancel()
            raise
        if group.task.done():
            return group.task.result()
        expires = asyncio.get_running_loop().call_later(self.config.rollout.group_timeout_s, self._expire, ordinal)
        self._waiting[ordinal] = group, expires
        raise lost.result()

    def _episodes(
        self, prompt: Prompt, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> list[EpisodeTask]:
        sampling = self._with_stop(sampling)
        every = [sampling.reseeded(prompt.ordinal, index) for index in range(group_size)]
        if self.config.algorithm.advantage == "remax":
            every.append(replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, seed=None))
        tasks = _tasks(prompt, RequestId(ordinal=prompt.ordinal, attempt=attempt.number), every)
        return [replace(task, recorded=attempt.of_episode(task.index)) for task in tasks]

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, *, attempt: int = 0
    ) -> list[EvaluatedPrompt]:
        """Run `num_samples` episodes per prompt, as many at a time as the router lets in for the training: trajectories
        that train on the replica wait for a seat, and not for the evaluation. `attempt`: differs in each call, since a
        lost one may still run."""
        rollout = self.config.rollout
        seats = rollout.max_num_seqs * rollout.data_parallel_size
        room = ReplicaRouter([replica], max_inflight(seats, num_samples, rollout.episodes_per_seat))
        sampling, scorer = self._with_stop(sampling), self.scorer.of_group()

        async def ask(prompt: Prompt) -> EvaluatedPrompt:
            first = RequestId(ordinal=prompt.ordinal, attempt=attempt, is_evaluation=True)
            every = [sampling.reseeded(prompt.ordinal, index) for index in range(num_samples)]
            await room.acquire(num_samples)
            tasks, end = _tasks(prompt, first, every), partial(room.release, replica)
            scored = await self._run(tasks, self.replicas[replica], end, replica, scorer)
            return EvaluatedPrompt(
                ordinal=prompt.ordinal,
                data_source=prompt.data_source,
                samples=tuple(map(_evaluated, scored)),
                text=prompt.text,
                ground_truth=prompt.ground_truth,
            )

        return await _all(map(ask, prompts))

    async def _run(
        self,
        tasks: Sequence[EpisodeTask],
        generate: GenerateGroup,
        end: Callable[[int], None],
        replica: str,
        scorer: RewardScorer,
    ) -> list[_Scored]:
        """Run the episodes, and score each when it has ended. `end`: told of so many that have ended."""
        tasks = [replace(task, emit=self.events.emit) for task in tasks]
        for task in tasks:
            self.events.emit(EpisodeStarted(**_of(task), replica=replica))
        calls = [tasks] if isinstance(self.loop, GroupLoop) else [[task] for task in tasks]
        ran = await _all(self._run_call(some, generate, end, scorer) for some in calls)
        return [scored for one in ran for scored in one]

    async def _run_call(
        self, tasks: Sequence[EpisodeTask], generate: GenerateGroup, end: Callable[[int], None], scorer: RewardScorer
    ) -> list[_Scored]:
        began, started = time.time(), time.perf_counter()
        if isinstance(self.loop, GroupLoop):
            episodes = await self.loop.run(tasks, generate)
        else:
            episodes = [await self.loop.run_episode(task, generate) for task in tasks]
        end(len(tasks))
        for task, episode in zip(tasks, episodes, strict=True):
            ended = EpisodeEnded(**_of(task), finish_reason=episode.finish_reason, num_tokens=episode.num_tokens)
            self.events.emit(ended)
        generated = time.perf_counter()
        texts = [self._text(episode) for episode in episodes]
        ran = list(zip(tasks, episodes, texts, strict=True))
        for task, episode, _ in ran:
            if episode.result is None:
                self.events.emit(RewardStarted(**_of(task)))
        results = iter(
            await scorer.score([(task.prompt, text) for task, episode, text in ran if episode.result is None])
        )
        reward_s = time.perf_counter() - generated
        scored = [
            _Scored(
                episode=episode,
                text=text,
                result=next(results) if episode.result is None else _settled(task, episode.result),
                began=began,
                generate_s=generated - started,
                reward_s=reward_s,
            )
            for task, episode, text in ran
        ]
        for task, one in zip(tasks, scored, strict=True):
            self.events.emit(RewardEnded(**_of(task), reward=finite(one.result.reward), error=one.result.error))
        return scored

    def _text(self, episode: Episode) -> str:
        """The responses of all its sequences, decoded, and last that with the policy's last words."""
        responses = [sequence.response_ids for sequence in episode.sequences]
        if responses:
            responses.append(responses.pop(episode.newest))
        return "\n".join(self.tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in responses)

    def _trajectory(self, replica: str, scored: _Scored) -> Trajectory:
        algorithm, episode, result = self.config.algorithm, scored.episode, scored.result
        return Trajectory(
            sequences=episode.sequences,
            reward=result.reward,
            finish_reason=episode.finish_reason,
            text=scored.text,
            replica=replica,
            cached_tokens=episode.cached_tokens,
            reward_metrics=result.metrics,
            agent_metrics=episode.metrics,
            overlong_penalty=overlong_penalty(
                episode.num_tokens,
                self.config.rollout.max_response_tokens,
                algorithm.overlong_buffer_tokens,
                algorithm.overlong_penalty,
            ),
            error=result.error,
            began=scored.began,
            generate_s=scored.generate_s,
            reward_s=scored.reward_s,
        )

    def _with_stop(self, sampling: SamplingParams) -> SamplingParams:
        """The engine returns no text, so the end-of-sequence token is a stop token like any other."""
        if sampling.ignore_eos:
            return sampling
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self.tokenizer.eos_token_id))


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What the calls return. One that raises ends them all."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [one.result() for one in running]


def _of(task: EpisodeTask) -> dict[str, Any]:
    """What names an episode in its events."""
    which = task.request_id
    return {
        "ordinal": which.ordinal,
        "attempt": which.attempt,
        "episode": which.episode,
        "is_evaluation": which.is_evaluation,
    }


def _settled(task: EpisodeTask, result: RewardResult) -> RewardResult:
    return settled(f"the reward of the agent loop for prompt {task.prompt.ordinal}", result)


def _tasks(prompt: Prompt, first: RequestId, every: Sequence[SamplingParams]) -> list[EpisodeTask]:
    """One episode per sampling, numbered from 0."""
    return [
        EpisodeTask(request_id=replace(first, episode=index), prompt=prompt, index=index, sampling=sampling)
        for index, sampling in enumerate(every)
    ]


def _evaluated(scored: _Scored) -> EvaluatedSample:
    episode, result = scored.episode, scored.result
    accuracy = result.reward if result.accuracy is None else result.accuracy
    return EvaluatedSample(
        accuracy=accuracy if result.error is None else 0.0,
        answer=result.answer if result.error is None else None,
        num_tokens=episode.num_tokens,
        response=scored.text,
        versions=frozenset(span.global_steps for sequence in episode.sequences for span in sequence.spans),
        error=result.error,
        agent_metrics=episode.metrics,
    )
