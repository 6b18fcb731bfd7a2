"""Runs agent loops and rewards, away from the driver's event loop. `worker_group.py` puts it into Ray actors."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from configs.schema import Config
from rollout.agents.loop import Abortable, AgentLoop, Episode, EpisodeTask, GenerateGroup, GroupLoop, resume_from
from rollout.agents.loop import end as end_shared
from rollout.agents.tool_processes import ToolProcesses, make_processes, tools_in
from rollout.chat.end_tokens import end_token_ids
from rollout.chat.text_decoder import text_decoder
from rollout.errors import NoTokensError, OtherRewardError, ReplicaLostError
from rollout.events.event import finite
from rollout.events.kinds import EpisodeEnded, EpisodeStarted, RewardEnded, RewardStarted
from rollout.events.log import SILENT, EventLog
from rollout.progress import Attempt, EpisodesOpen, GroupMessage, Move, ReplicaLost
from rollout.request_ids import InGroup, RequestId
from rollout.rewards.base import RewardResult, read_checksum
from rollout.rewards.dapo import overlong_penalty
from rollout.rewards.outcome import settled
from rollout.rewards.scoring import RewardScorer
from rollout.router import ReplicaRouter, max_inflight
from rollout.types import (
    Completion,
    EvaluatedPrompt,
    EvaluatedSample,
    GenerationRequest,
    IntArray,
    Prompt,
    SamplingParams,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """An episode with its reward."""

    episode: Episode
    text: str
    """The responses of all sequences, for people."""
    result: RewardResult
    """The environment's, or else the reward's."""
    began: float
    """The time at which its call began, in seconds since the epoch."""
    generate_s: float
    reward_s: float
    tool_s: float


class PolicyTime:
    """Passes the requests of a call on, and measures for how long at least one of them waits for its answer: the rest
    of the call is the time of tools, environments and harnesses.

    Example:
        policy = PolicyTime(relay)
        episode = await loop.run_episode(task, policy)
        policy.seconds  # 3.5
    """

    def __init__(self, generate: GenerateGroup):
        self.seconds = 0.0
        self._generate, self._num_open, self._since = generate, 0, 0.0
        self._clock = asyncio.get_running_loop().time

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        if not self._num_open:
            self._since = self._clock()
        self._num_open += 1
        try:
            return await self._generate(requests)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self.seconds += self._clock() - self._since

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        """End requests as `Abortable.abort` does. Return False where they cannot be ended."""
        return isinstance(self._generate, Abortable) and await self._generate.abort(request_ids)


class Relay:
    """Sends a group's requests to the replica of its attempt. When that is lost, they wait for the next attempt, and
    continue there from the tokens they had: an episode does not notice, whatever its environment or harness has done.

    Example:
        relay = Relay(generate_on_replica_0, Attempt(), on_lost=news.set)
        task = asyncio.create_task(loop.run(tasks, relay))
        relay.lost  # ReplicaLostError("replica-0 died")
        relay.move(generate_on_replica_1, Attempt(number=1, partials=partials))
    """

    def __init__(self, generate: GenerateGroup, attempt: Attempt, on_lost: Callable[[], object] = lambda: None):
        self._on_lost = on_lost
        self._answered: set[InGroup] = set()
        self._moved = asyncio.Event()
        self.move(generate, attempt)

    def move(self, generate: GenerateGroup, attempt: Attempt) -> None:
        """Send requests to another replica from now on, and with them those that wait."""
        self._attempt, self._replica = attempt, generate
        self._generate = resume_from(attempt.partials, generate, self._answered)
        self.lost: ReplicaLostError | None = None
        """The loss of the present replica."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        while True:
            moved = self._moved
            try:
                completions = await self._generate([self._named(request) for request in requests])
                self._answered.update(request.request_id.in_group for request in requests)
                return completions
            except ReplicaLostError as error:
                # The old replica may fail some requests only after the move: they know by their own event.
                if not moved.is_set() and self.lost is None:
                    self.lost = error
                    self._on_lost()
            await moved.wait()  # until the driver's next attempt, or until it gives the group up and cancels

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        """End requests as `Abortable.abort` does. Return False while they wait for a replica."""
        if self.lost is not None or not isinstance(self._replica, Abortable):
            return False
        return await self._replica.abort([replace(name, attempt=self._attempt.number) for name in request_ids])

    def _named(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, request_id=replace(request.request_id, attempt=self._attempt.number))


@dataclass(kw_only=True)
class AgentWorker:
    """Runs episodes on replicas, and scores them.

    Example:
        worker.replicas["replica-3"] = generate
        async for message in worker.run_group(prompt, "replica-3", sampling, 8, Attempt()):
            print(message)  # EpisodesOpen(count=5), EpisodesOpen(count=0), TrajectoryGroup(...)
    """

    config: Config
    tokenizer: Any
    """A tokenizer of transformers."""
    loop: AgentLoop
    scorer: RewardScorer
    replicas: dict[str, GenerateGroup]
    """The replicas that it generates on, by name. More may be added."""
    events: EventLog = SILENT
    """The log of what happens here, for the driver."""
    clock_ahead_s: float = 0.0
    """The seconds by which this machine's clock is ahead of the driver's."""

    def __post_init__(self) -> None:
        self._end_token_ids = end_token_ids(self.tokenizer, chat=self.config.data.chat_template)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        """Run and score all episodes of the prompt; with remax a greedy one besides. See `GroupRunner.run_group`.

        An attempt that begins here with partial completions runs the agent loop from its beginning, and its requests
        are answered with what was sampled before: an environment gets back into its state by hearing the same turns.
        The policy hears what the environment said before, and not what it says now. Where nothing of that was recorded,
        and it answers otherwise, the trajectory is sampled anew from there.

        Raises NoTokensError.
        """
        news = asyncio.Event()
        relay = Relay(self.replicas[replica], attempt, on_lost=news.set)
        episodes = self._episodes(prompt, sampling, group_size, attempt)
        num_open = num_reported = len(episodes)

        def end(count: int) -> None:
            nonlocal num_open
            num_open -= count  # their rewards are still to come, which need no room on a replica
            news.set()

        running = asyncio.create_task(_all(self._calls(episodes, relay, end, replica, self.scorer.for_group())))
        running.add_done_callback(lambda _: news.set())
        try:
            while not running.done():
                await news.wait()
                news.clear()
                if relay.lost is not None and not running.done():
                    move = yield ReplicaLost(relay.lost)
                    assert move is not None
                    replica, num_reported = move.replica, len(episodes)
                    relay.move(self.replicas[replica], move.attempt)
                if num_open < num_reported and not running.done():
                    num_reported = num_open
                    yield EpisodesOpen(num_open)
            scored = list(chain.from_iterable(running.result()))
        finally:
            running.cancel()  # the consumer has closed the generator, or was cancelled
        yield self._group(prompt, replica, scored, group_size)

    def _group(self, prompt: Prompt, replica: str, scored: Sequence[_Scored], group_size: int) -> TrajectoryGroup:
        trajectories = tuple(self._trajectory(replica, episode) for episode in scored)
        group = TrajectoryGroup(
            prompt=prompt,
            trajectories=trajectories[:group_size],
            greedy=trajectories[group_size] if len(trajectories) > group_size else None,
        )
        if not group.is_aborted and not any(trajectory.versions for trajectory in group.trajectories):
            rollout = self.config.rollout
            loop = rollout.agent or rollout.agent_command or rollout.agent_loop
            error = next((error for error in group.errors if error is not None), None)
            why = "" if error is None else f"; the first failed with {error}"
            of_group = f"prompt {prompt.ordinal}: none of its episodes has a token"
            raise NoTokensError(f"{of_group} that the policy sampled in {loop}{why}")
        return group.with_shared_routes()

    @cached_property
    def _tool_processes(self) -> ToolProcesses | None:
        return make_processes(self.config.rollout)

    async def close(self) -> None:
        """Let the agent loop end what it holds: the run has ended."""
        try:
            if (close := getattr(self.loop, "close", None)) is not None:
                await close()
        finally:
            if self._tool_processes is not None:
                self._tool_processes.close()
            await end_shared()  # what rewards and environments share

    def _episodes(
        self, prompt: Prompt, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> list[EpisodeTask]:
        sampling = self._with_stop(sampling)
        every = [sampling.reseeded(prompt.ordinal, index) for index in range(group_size)]
        if self.config.algorithm.advantage == "remax":
            every.append(replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=None))
        tasks = _tasks(prompt, RequestId(ordinal=prompt.ordinal, attempt=attempt.number), every)
        return [replace(task, recorded=attempt.episode_partials(task.index)) for task in tasks]

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, attempt: int = 0
    ) -> list[EvaluatedPrompt]:
        """Run `num_samples` episodes per prompt, as many at a time as the training has on a replica at first:
        trajectories that train there wait for a seat, and not for the evaluation. `attempt`: differs in each call,
        since a lost one may still run."""
        rollout = self.config.rollout
        seats = rollout.max_num_seqs * rollout.data_parallel_size
        room = ReplicaRouter([replica], max_inflight(seats, num_samples, rollout.episodes_per_seat))
        sampling, scorer = self._with_stop(sampling), self.scorer.for_group()

        async def ask(prompt: Prompt) -> EvaluatedPrompt:
            first = RequestId(ordinal=prompt.ordinal, attempt=attempt, is_evaluation=True)
            every = [sampling.reseeded(prompt.ordinal, index) for index in range(num_samples)]
            await room.acquire(num_samples)
            tasks = _tasks(prompt, first, every)

            def end(count: int) -> None:
                room.release(replica, count)

            scored = chain.from_iterable(await _all(self._calls(tasks, self.replicas[replica], end, replica, scorer)))
            return EvaluatedPrompt(
                ordinal=prompt.ordinal,
                data_source=prompt.data_source,
                samples=tuple(map(_evaluated, scored)),
                text=prompt.text,
                ground_truth=prompt.ground_truth,
                source=prompt.source,
            )

        return await _all(map(ask, prompts))

    def _calls(
        self,
        tasks: Sequence[EpisodeTask],
        generate: GenerateGroup,
        end: Callable[[int], None],
        replica: str,
        scorer: RewardScorer,
    ) -> Iterator[Coroutine[Any, Any, list[_Scored]]]:
        """Begin the episodes, each of which is scored when it has ended. `end` is told of so many that have ended."""
        tasks = [replace(task, emit=self.events.emit) for task in tasks]
        for task in tasks:
            self.events.emit(EpisodeStarted(**task.event_fields, replica=replica))
        together = [tasks] if isinstance(self.loop, GroupLoop) else [[task] for task in tasks]
        return (self._run_call(some, generate, end, scorer) for some in together)

    async def _run_call(
        self, tasks: Sequence[EpisodeTask], generate: GenerateGroup, end: Callable[[int], None], scorer: RewardScorer
    ) -> list[_Scored]:
        clock, policy = asyncio.get_running_loop().time, PolicyTime(generate)
        began, started = time.time() - self.clock_ahead_s, clock()
        with tools_in(self._tool_processes):
            if isinstance(self.loop, GroupLoop):
                episodes = await self.loop.run(tasks, policy)
            else:
                episodes = [await self.loop.run_episode(task, policy) for task in tasks]
        end(len(tasks))
        for task, episode in zip(tasks, episodes, strict=True):
            reason = episode.finish_reason
            self.events.emit(EpisodeEnded(**task.event_fields, finish_reason=reason, num_tokens=episode.num_tokens))
        generated = clock()
        unscored = [(task, episode) for task, episode in zip(tasks, episodes, strict=True) if episode.result is None]
        for task, _ in unscored:
            self.events.emit(RewardStarted(**task.event_fields))
        said = {task.index: self._text(episode, sampled_only=True) for task, episode in unscored}
        results = iter(await scorer.score([(task.prompt, said[task.index]) for task, _ in unscored]))
        reward_s = clock() - generated
        scored = [
            _Scored(
                episode=episode,
                text=self._text(episode),
                result=settled(f"the reward of the agent loop for prompt {task.prompt.ordinal}", episode.result)
                if episode.result is not None
                else _own_result(task, said[task.index], next(results)),
                began=began,
                generate_s=generated - started,
                reward_s=reward_s,
                tool_s=max(0.0, generated - started - policy.seconds),
            )
            for task, episode in zip(tasks, episodes, strict=True)
        ]
        for task, outcome in zip(tasks, scored, strict=True):
            result = outcome.result
            self.events.emit(RewardEnded(**task.event_fields, reward=finite(result.reward), error=result.error))
        return scored

    @cached_property
    def _decode(self) -> Callable[[Iterable[int]], str]:
        return text_decoder(self.tokenizer)

    def _text(self, episode: Episode, *, sampled_only: bool = False) -> str:
        """Decode the responses of all sequences, the one with the policy's last words last.

        `sampled_only`: what a reward reads, which is all that the policy sampled, turn by turn, and nothing that a
        tool, an environment or a harness said: the number that a tool returns is not the policy's answer.
        """
        sequences = list(episode.sequences)
        if sequences:
            sequences.append(sequences.pop(episode.newest))
        parts = (_sampled_turns(sequence) if sampled_only else [sequence.response_ids] for sequence in sequences)
        return "\n".join(self._decode(token_ids) for part in parts for token_ids in part)

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
            tool_s=scored.tool_s,
        )

    def _with_stop(self, sampling: SamplingParams) -> SamplingParams:
        """Make the tokens that end a turn stop tokens like any other: the engine returns no text."""
        if sampling.ignore_eos:
            return sampling
        every = dict.fromkeys((*sampling.stop_token_ids, *self._end_token_ids))
        return replace(sampling, stop_token_ids=tuple(every))


def _sampled_turns(sequence: TokenSequence) -> list[IntArray]:
    """Return the runs of sampled tokens in a response."""
    is_sampled = sequence.loss_mask | (sequence.token_versions() >= 0)  # a loop may leave some of them out of the loss
    borders = np.flatnonzero(np.diff(is_sampled)) + 1
    runs = np.split(sequence.response_ids, borders)
    return runs[0 if len(is_sampled) and is_sampled[0] else 1 :: 2]


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all calls and return their results. If one raises, end the others."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [future.result() for future in running]


def _own_result(task: EpisodeTask, said: str, result: RewardResult) -> RewardResult:
    """Return the result of a reward. Raises OtherRewardError where it is that of another text."""
    if result.read is not None and result.read != read_checksum(task.prompt, said):
        which = f"prompt {task.prompt.ordinal}, trajectory {task.index}"
        raise OtherRewardError(f"{which}: its reward was computed for the response of another episode")
    return result


def _tasks(prompt: Prompt, first: RequestId, every: Sequence[SamplingParams]) -> list[EpisodeTask]:
    """Make one episode per sampling, numbered from 0."""
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
        error=None if episode.finish_reason == "abort" else result.error,
        agent_metrics=episode.metrics,
    )
