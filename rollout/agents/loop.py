"""Agent loops make episodes of prompts, over a `generate` callable."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from configs.runtime.dotted import find
from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.request_ids import InGroup, RequestId
from rollout.rewards.base import RewardResult
from rollout.types import (
    Completion,
    GenerationRequest,
    IntArray,
    Prompt,
    SamplingParams,
    TokenSequence,
)

GenerateGroup = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
"""Sends requests to one replica, and returns their completions in order. Cancelling the call ends them."""


@runtime_checkable
class Abortable(Protocol):
    """A `GenerateGroup` whose requests can also be ended with what they have sampled."""

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        """Make the requests answer with the tokens they have, and finish_reason "abort". Returns whether they were all
        at an engine. May raise ReplicaLostError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    request_id: RequestId
    """The name of its first turn."""
    prompt: Prompt
    index: int
    """Place in the prompt's group."""
    sampling: SamplingParams
    """`max_tokens` bounds the whole response: all turns, and what the environment says."""
    recorded: Mapping[int, PartialCompletion] = field(default_factory=dict)
    """The partial completions of earlier attempts at the episode, by turn. An agent loop needs it only for what an
    environment said: `generate` itself answers with what was sampled."""
    emit: Emit = field(default=nobody, compare=False, repr=False)
    """Takes events of the episode. In another process than the agent worker's nobody listens."""

    @property
    def event_fields(self) -> dict[str, Any]:
        """The fields that identify the episode in its events."""
        which = self.request_id
        return {
            "ordinal": which.ordinal,
            "attempt": which.attempt,
            "episode": which.episode,
            "is_evaluation": which.is_evaluation,
        }

    def recorded_observation(self, turn: int, token_ids: Sequence[int]) -> IntArray | None:
        """Return what an environment said before the turn in an earlier attempt, if all tokens until then were
        these."""
        partial = self.recorded.get(turn)
        if partial is None or partial.observed is None:
            return None
        prompt_ids = np.concatenate([np.array(token_ids, np.int32), partial.observed])
        return partial.observed if prompt_checksum(prompt_ids) == partial.prompt_checksum else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """A trajectory before its reward. Fields as in `Trajectory`; `metrics` are its `agent_metrics`."""

    sequences: tuple[TokenSequence, ...]
    finish_reason: str
    cached_tokens: int
    result: RewardResult | None = None
    """The reward, where the environment gives it itself or has failed. None: the reward function scores the
    response."""
    metrics: dict[str, float] = field(default_factory=dict)
    newest: int = -1
    """The index of the sequence with what the policy said last: rewards read it at the end of the text."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all responses."""
        return sum(len(sequence.response_ids) for sequence in self.sequences)


@runtime_checkable
class GroupLoop(Protocol):
    """Makes all episodes of a group in one call: they end together."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]: ...


@runtime_checkable
class EpisodeLoop(Protocol):
    """Makes one episode per call. The episodes of a group run concurrently: each is scored when it ends, and gives its
    room on the replica to another group then."""

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode: ...


AgentLoop = GroupLoop | EpisodeLoop
"""A user's own is named by rollout.agent_loop=package.module:name. One that is both is run as a GroupLoop.

A loop that holds what outlives its episodes, such as a pool of sandboxes, has besides `async def close(self) -> None`.
It is called once, when the run ends, but not in an agent worker that is killed. A loop whose prompts show tools, by the
chat template, has `prompt_tools: Sequence[ToolSpec]`."""


class SingleTurn:
    """The policy answers once: one request per trajectory."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        requests = [
            GenerationRequest(request_id=task.request_id, prompt_ids=task.prompt.token_ids, sampling=task.sampling)
            for task in tasks
        ]
        return [
            Episode(
                sequences=(TokenSequence.of(task.prompt.token_ids, completion),),
                finish_reason=completion.finish_reason,
                cached_tokens=completion.cached_tokens,
            )
            for task, completion in zip(tasks, await generate(requests), strict=True)
        ]


def load_agent_loop(name: str, tokenizer: Any, args: Mapping[str, Any] = MappingProxyType({})) -> AgentLoop:
    """Load single_turn, or the `package.module:name` of a class or function that makes a loop of the tokenizer and,
    by name, the `args` of rollout.agent_args. Raises ValueError for what is no agent loop."""
    if name == "single_turn":
        return SingleTurn()
    loop = find("rollout.agent_loop", name, ("tokenizer",), ("single_turn",), args)(tokenizer, **args)
    if not isinstance(loop, AgentLoop):
        has_none = "has no run(tasks, generate) and no run_episode(task, generate)"
        raise ValueError(f"rollout.agent_loop={name}: gave {loop!r:.100}, which {has_none}")
    return loop


def is_harness(config: Config) -> bool:
    """Return whether episodes are those of a harness, over sessions."""
    return config.rollout.agent is not None or config.rollout.agent_command is not None


def is_replayable(config: Config) -> bool:
    """Return whether episodes that run again from their beginning hear what was sampled for them before."""
    return config.sessions.replayable or not is_harness(config)


def resume_from(
    partials: Mapping[InGroup, PartialCompletion],
    generate: GenerateGroup,
    answered: Collection[InGroup] = frozenset(),
) -> GenerateGroup:
    """Return `generate` for a later attempt: requests that are complete are answered at once, others continue from the
    tokens they have. A request with another prompt than before begins anew, and so does one that was aborted: mostly a
    harness had given it up, which may now wait for the answer.

    The turns of an episode may come in another order than before, as those of sub-agents that run side by side: a
    request takes what was sampled for its prompt, its own turn's if that is there. What one turn has taken no other
    gets; the same turn gets it as often as it asks.

    Args:
        answered: turns whose answer an episode that goes on has heard already. No other turn gets that, too.
    """
    known: defaultdict[tuple[int, int], dict[int, PartialCompletion]] = defaultdict(dict)
    reported: dict[tuple[InGroup, int], PartialCompletion] = {}
    for (episode, turn), partial in sorted(partials.items(), key=lambda item: item[0]):
        if partial.completion.num_tokens == 0 and not partial.completion.finish_reason:
            continue
        if partial.completion.finish_reason != "abort":
            known[episode, partial.prompt_checksum][turn] = partial
        reported[(episode, turn), partial.prompt_checksum] = partial
    taken: dict[tuple[InGroup, int], PartialCompletion | None] = {}

    def take_all(keys: Sequence[tuple[InGroup, int]]) -> None:
        new = [key for key in keys if key not in taken]
        for (episode, turn), checksum in new:  # before the others take what is left
            taken[(episode, turn), checksum] = known[episode, checksum].pop(turn, None)
        for (episode, turn), checksum in new:
            same_prompt = known[episode, checksum]
            open_turns = [other for other in same_prompt if (episode, other) not in answered]
            if taken[(episode, turn), checksum] is None and open_turns:
                taken[(episode, turn), checksum] = same_prompt.pop(min(open_turns))

    async def generate_the_rest(requests: list[GenerationRequest]) -> list[Completion]:
        keys = [(request.request_id.in_group, prompt_checksum(request.prompt_ids)) for request in requests]
        take_all(keys)
        answers: dict[RequestId, Completion] = {}
        rest: list[GenerationRequest] = []
        for request, key in zip(requests, keys, strict=True):
            partial = taken[key]
            if partial is not None and partial.completion.finish_reason:
                answers[request.request_id] = partial.completion
                continue
            sampled = request.partial if partial is None else partial.completion
            rest.append(replace(request, partial=sampled, reports_whole=reported.get(key, partial) is not partial))
        completions = await generate(rest) if rest else []
        answers |= {request.request_id: completion for request, completion in zip(rest, completions, strict=True)}
        return [answers[request.request_id] for request in requests]

    return generate_the_rest


# -- what outlives episodes: pools, retrievers, connections ------------------------------------------------------------

Close = Callable[[], Awaitable[object]]
_at_end: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Close]] = WeakKeyDictionary()


def at_end(close: Close) -> None:
    """Register `close`, to be awaited once on this event loop when the run ends. A harness is a function, and so has
    no place for a `close` of its own."""
    _at_end.setdefault(asyncio.get_running_loop(), []).append(close)


async def end() -> None:
    """Close what was given to `at_end`. Raises as `close_all` does."""
    await close_all(_at_end.pop(asyncio.get_running_loop(), ()))


async def close_all(closes: Sequence[Close]) -> None:
    """Call each, whatever the others raise. Raises an ExceptionGroup of what they raise."""
    outcomes = await asyncio.gather(*(close() for close in closes), return_exceptions=True)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise ExceptionGroup(f"{len(errors)} of {len(outcomes)} could not be closed: {errors!r:.500}", errors)
