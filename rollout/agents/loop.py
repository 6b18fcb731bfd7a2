"""What an agent loop is: it makes episodes of prompts, over a `generate` callable."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from configs.runtime.dotted import find
from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.request_ids import InGroup, RequestId
from rollout.rewards.base import RewardResult
from rollout.sessions.messages import ToolSpec
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
        """The requests answer with the tokens they have, and finish_reason "abort". Returns whether they were all at
        an engine. May raise ReplicaLostError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    request_id: RequestId
    """Of its first turn."""
    prompt: Prompt
    index: int
    """Place in the prompt's group."""
    sampling: SamplingParams
    """`max_tokens` bounds the whole response: all turns, and what the environment says."""
    recorded: Mapping[int, PartialCompletion] = field(default_factory=dict)
    """What earlier attempts at the episode had, by turn. An agent loop needs it only for what an environment said:
    `generate` itself answers with what was sampled."""
    emit: Emit = field(default=nobody, compare=False, repr=False)
    """Takes events of the episode. In another process than the agent worker's nobody listens."""

    def recorded_observation(self, turn: int, token_ids: Sequence[int]) -> IntArray | None:
        """What an environment said before the turn in an earlier attempt, if all tokens until then were these."""
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
    """From an environment that gives the reward itself, or that failed. None: the reward function scores the
    response."""
    metrics: dict[str, float] = field(default_factory=dict)
    newest: int = -1
    """Which of the sequences has what the policy said last: rewards read it at the end of the text."""

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
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
"""A user's own is given by rollout.agent_loop=package.module:name. One that is both is run as a GroupLoop."""


@runtime_checkable
class Ends(Protocol):
    """An agent loop that holds what outlives its episodes, such as a pool of sandboxes."""

    async def close(self) -> None:
        """Called once, when the run ends: not in an agent worker that is killed."""
        ...


@runtime_checkable
class ShowsTools(Protocol):
    """An agent loop whose prompts show tools, by the chat template."""

    @property
    def prompt_tools(self) -> Sequence[ToolSpec]: ...


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
    """`name`: single_turn, or the `package.module:name` of a class or function that makes a loop of the tokenizer and,
    by name, the `args` of rollout.agent_args. Raises ValueError for what is no agent loop."""
    if name == "single_turn":
        return SingleTurn()
    loop = find("rollout.agent_loop", name, ("tokenizer",), ("single_turn",), args)(tokenizer, **args)
    if not isinstance(loop, AgentLoop):
        has_none = "has no run(tasks, generate) and no run_episode(task, generate)"
        raise ValueError(f"rollout.agent_loop={name}: gave {loop!r:.100}, which {has_none}")
    return loop


def is_harness(config: Config) -> bool:
    """Whether episodes are those of a harness, over sessions."""
    return config.rollout.agent is not None or config.rollout.agent_command is not None


def is_replayable(config: Config) -> bool:
    """Whether episodes that run again from their beginning hear what was sampled for them before."""
    return config.sessions.replayable or not is_harness(config)


def resume_from(partials: Mapping[InGroup, PartialCompletion], generate: GenerateGroup) -> GenerateGroup:
    """`generate` for a later attempt: requests that are complete are answered at once, others continue from the tokens
    they have. A request with another prompt than before begins anew.

    The turns of an episode may come in another order than before, as those of sub-agents that run side by side: a
    request takes what was sampled for its prompt, its own turn's if that is there. What one turn has taken no other
    gets; the same turn gets it as often as it asks.
    """
    known: defaultdict[tuple[int, int], dict[int, PartialCompletion]] = defaultdict(dict)
    for (episode, turn), partial in sorted(partials.items(), key=lambda item: item[0]):
        if partial.completion.num_tokens == 0 and not partial.completion.finish_reason:
            continue
        known[episode, partial.prompt_checksum][turn] = partial
    taken: dict[tuple[InGroup, int], PartialCompletion | None] = {}

    def take_all(requests: list[GenerationRequest]) -> list[PartialCompletion | None]:
        asked = [(request.request_id.in_group, prompt_checksum(request.prompt_ids)) for request in requests]
        new = [key for key in asked if key not in taken]
        for (episode, turn), checksum in new:  # before the others take what is left
            taken[(episode, turn), checksum] = known[episode, checksum].pop(turn, None)
        for (episode, turn), checksum in new:
            of_prompt = known[episode, checksum]
            if taken[(episode, turn), checksum] is None and of_prompt:
                taken[(episode, turn), checksum] = of_prompt.pop(min(of_prompt))
        return [taken[key] for key in asked]

    async def generate_the_rest(requests: list[GenerationRequest]) -> list[Completion]:
        answers: dict[RequestId, Completion] = {}
        rest: list[GenerationRequest] = []
        for request, partial in zip(requests, take_all(requests), strict=True):
            if partial is None:
                rest.append(request)
            elif partial.completion.finish_reason:
                answers[request.request_id] = partial.completion
            else:
                rest.append(replace(request, partial=partial.completion))
        completions = await generate(rest) if rest else []
        answers |= {request.request_id: completion for request, completion in zip(rest, completions, strict=True)}
        return [answers[request.request_id] for request in requests]

    return generate_the_rest
