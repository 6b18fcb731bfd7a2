"""What an agent loop is: it makes episodes of prompts, over a `generate` callable."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from configs.runtime.dotted import find
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.request_ids import InGroup, RequestId
from rollout.rewards.base import RewardResult
from rollout.types import (
    Completion,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TokenSequence,
)

GenerateGroup = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
"""Sends requests to one replica, and returns their completions in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    request_id: RequestId
    """Of its first turn."""
    prompt: Prompt
    index: int
    """Place in the prompt's group."""
    sampling: SamplingParams
    """`max_tokens` bounds the whole response: all turns, and what the environment says."""


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

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(len(sequence.response_ids) for sequence in self.sequences)


@runtime_checkable
class AgentLoop(Protocol):
    """Makes one episode per task. A user's own is given by rollout.agent_loop=package.module:name."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]: ...


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


def load_agent_loop(name: str, tokenizer: Any) -> AgentLoop:
    """`name`: single_turn, or the `package.module:name` of a class or function that makes a loop of the tokenizer.
    Raises ValueError for what is no agent loop."""
    if name == "single_turn":
        return SingleTurn()
    loop = find("rollout.agent_loop", name, ("tokenizer",), known=("single_turn",))(tokenizer)
    if not isinstance(loop, AgentLoop):
        raise ValueError(f"rollout.agent_loop={name}: gave {loop!r:.100}, which has no run(tasks, generate)")
    return loop


def resume_from(partials: Mapping[InGroup, PartialCompletion], generate: GenerateGroup) -> GenerateGroup:
    """`generate` for a later attempt: requests that are complete are answered at once, others continue from the tokens
    they have. A request with another prompt than before begins anew.

    The turns of an episode may come in another order than before, as those of sub-agents that run side by side: a
    request takes what was sampled for its prompt, unless another request beside it does.
    """
    known: defaultdict[tuple[int, int], dict[int, PartialCompletion]] = defaultdict(dict)
    for (episode, turn), partial in sorted(partials.items(), key=lambda item: item[0]):
        known[episode, partial.prompt_checksum][turn] = partial

    def take(request: GenerationRequest, beside: set[InGroup]) -> PartialCompletion | None:
        episode, turn = request.request_id.in_group
        of_prompt = known[episode, prompt_checksum(request.prompt_ids)]
        if turn in of_prompt:
            return of_prompt[turn]
        return of_prompt.pop(next((other for other in of_prompt if (episode, other) not in beside), turn), None)

    async def generate_the_rest(requests: list[GenerationRequest]) -> list[Completion]:
        answers: dict[RequestId, Completion] = {}
        rest: list[GenerationRequest] = []
        beside = {request.request_id.in_group for request in requests}
        for request in requests:
            partial = take(request, beside)
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
