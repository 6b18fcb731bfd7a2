"""Draw episodes from a profile: how many turns, how many tokens in each, how long their tools take."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from configs.rewards import RewardTerm
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.request_ids import RequestId
from rollout.rewards.places import Called
from rollout.rewards.scoring import RewardScorer
from rollout.types import Completion, GenerationRequest, Prompt, TokenSequence, VersionSpan
from scripts.simulate.profile import Profile
from scripts.simulate.simulated_run import NEVER_S


@dataclass(frozen=True, slots=True)
class Drawn:
    """An episode as it was drawn."""

    tokens: tuple[int, ...]
    """The tokens of each turn; the next two are by turn as well."""
    uncached: tuple[int, ...]
    tool_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws episodes of a profile. The same prompt, place and seed give the same episode, in every configuration."""

    profile: Profile
    seed: int = 0
    longest: float = 1.0
    """Draws beyond this probability are cut off at it: below 1, there are no stragglers."""

    def episode(self, which: RequestId) -> Drawn:
        profile = self.profile
        group_normal = _group_normal(self.seed, which.is_evaluation, which.ordinal)
        own = np.random.default_rng([self.seed, which.is_evaluation, which.ordinal, 1 + which.episode, which.attempt])
        shared, alone = sqrt(profile.alike), sqrt(1 - profile.alike)
        z_turns, z_tokens = shared * group_normal + alone * own.standard_normal(2)
        count = max(1, round(min(profile.turns.at_normal(z_turns), profile.turns.at(self.longest))))
        z = (z_tokens, *own.standard_normal(count - 1))
        limit = profile.turn_tokens.at(self.longest)
        tokens = tuple(max(1, round(min(profile.turn_tokens.at_normal(normal), limit))) for normal in z)
        uncached = tuple(round(profile.uncached_tokens.at(p)) for p in own.random(count))
        tool_s = tuple(profile.tool_s.at(p) for p in own.random(count)) if profile.has_tools else (0.0,) * count
        return Drawn(tokens, uncached, tool_s)

    def reward_s(self, ordinal: int) -> float:
        if len(self.profile.reward_s.values) == 1:
            return self.profile.reward_s.values[0]
        rng = np.random.default_rng([self.seed, 2, ordinal])
        return self.profile.reward_s.at(float(rng.random()))


@lru_cache(maxsize=4096)
def _group_normal(seed: int, is_evaluation: bool, ordinal: int) -> NDArray[np.float64]:
    return np.random.default_rng([seed, is_evaluation, ordinal]).standard_normal(2)


@lru_cache(maxsize=4096)
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


def _request(task: EpisodeTask, drawn: Drawn, turn: int, profile: Profile) -> GenerationRequest:
    """Return a turn with the tokens of its prompt that are to be computed, or, where the KV cache is simulated, all."""
    before = sum(drawn.uncached[:turn]) + sum(drawn.tokens[:turn]) if profile.kv_tokens else 0
    return GenerationRequest(
        request_id=replace(task.request_id, turn=turn),
        prompt_ids=_prompt(before + drawn.uncached[turn]),
        sampling=replace(task.sampling, max_tokens=drawn.tokens[turn], ignore_eos=True),
    )


def _episode(completions: Sequence[Completion]) -> Episode:
    total = sum(completion.num_tokens for completion in completions)
    spans, offset = [], 0
    for completion in completions:
        for span in completion.spans:
            spans.append(VersionSpan(offset + span.start, offset + span.end, span.global_steps))
        offset += completion.num_tokens
    sequence = TokenSequence(
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.broadcast_to(np.int32(0), total),
        loss_mask=np.broadcast_to(np.bool_(True), total),
        rollout_logprobs=np.broadcast_to(np.float32(0), total),
        spans=tuple(spans),
    )
    return Episode(sequences=(sequence,), finish_reason="stop", cached_tokens=0)


@dataclass(frozen=True, slots=True)
class ByThemselves:
    """An agent loop: every episode is run by itself, its tools between its turns."""

    draws: Draws

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        drawn, completions = self.draws.episode(task.request_id), []
        await asyncio.sleep(self.draws.profile.dispatch_s)
        for turn in range(len(drawn.tokens)):
            completions += await generate([_request(task, drawn, turn, self.draws.profile)])
            await asyncio.sleep(drawn.tool_s[turn])
        return _episode(completions)


@dataclass(frozen=True, slots=True)
class Together:
    """An agent loop: the episodes of a group, of one turn each, are one call."""

    draws: Draws

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        await asyncio.sleep(self.draws.profile.dispatch_s)
        requests = [_request(task, self.draws.episode(task.request_id), 0, self.draws.profile) for task in tasks]
        return [_episode([completion]) for completion in await generate(requests)]


def drawn_reward(draws: Draws) -> RewardScorer:
    """Return a reward that takes its time."""

    async def reward(prompt: Prompt, text: str) -> float:
        await asyncio.sleep(draws.reward_s(prompt.ordinal))
        return 0.0

    return RewardScorer(((RewardTerm("drawn", 1.0), Called(reward, timeout_s=NEVER_S)),))
