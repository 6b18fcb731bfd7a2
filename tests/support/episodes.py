"""Episodes side by side, as an agent worker runs those of a group."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.agents.loop import AgentLoop, Episode, EpisodeTask, GenerateGroup, GroupLoop
from rollout.progress import PartialCompletion
from rollout.request_ids import RequestId
from rollout.types import Prompt, SamplingParams
from tests.support.fakes import make_prompt


def make_task(
    index: int = 0,
    prompt: Prompt | None = None,
    recorded: Mapping[int, PartialCompletion] | None = None,
    max_tokens: int = 40,
    **sampling: Any,
) -> EpisodeTask:
    """Make the task of an episode of prompt 17, or of another prompt."""
    prompt = prompt or make_prompt(17)
    return EpisodeTask(
        request_id=RequestId(ordinal=prompt.ordinal, episode=index),
        prompt=prompt,
        index=index,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        recorded=recorded or {},
    )


def error_of(episode: Episode) -> str:
    """Return the error for which an episode has no reward, or "" if it has one. Its reward is not left to others."""
    assert episode.result is not None
    return episode.result.error or ""


async def episodes_of(loop: AgentLoop, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
    if isinstance(loop, GroupLoop):
        return await loop.run(tasks, generate)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(loop.run_episode(task, generate)) for task in tasks]
    return [episode.result() for episode in running]
