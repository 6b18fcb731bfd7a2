"""Episodes side by side, as an agent worker runs those of a group."""

import asyncio
from collections.abc import Sequence

from rollout.agents.loop import AgentLoop, Episode, EpisodeTask, GenerateGroup, GroupLoop


async def episodes_of(loop: AgentLoop, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
    if isinstance(loop, GroupLoop):
        return await loop.run(tasks, generate)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(loop.run_episode(task, generate)) for task in tasks]
    return [episode.result() for episode in running]
