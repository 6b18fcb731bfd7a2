"""Search by tags in the turns of a chat, as SkyRL's fully asynchronous recipe has it: what was found comes as a message
of the user's, by the chat template.

rollout.agent_loop=rollout.search.conversation:agent_loop data.chat_template=true
"""

from dataclasses import replace
from functools import wraps
from typing import Any

from rollout.agents.environment import Environment, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.search import tags
from rollout.sessions.chat_turns import ChatTurns
from rollout.sessions.messages import Message, Role


class InMessages:
    """An environment whose texts are messages of the user's."""

    def __init__(self, environment: Environment):
        """`environment`: an async one."""
        self._environment = environment

    async def step(self, turn: Turn, /) -> Step:
        step = self._environment.step(turn)
        step = step if isinstance(step, Step) else await step
        if step.done or not isinstance(step.observation, str):
            return step
        return replace(step, observation=[Message(role=Role.user, content=step.observation)])


@wraps(tags.agent_loop)
def agent_loop(tokenizer: Any, **arguments: Any) -> MultiTurn:
    """As that of `rollout.search.tags`, for a tokenizer with a chat template. Raises ValueError."""
    loop = tags.agent_loop(tokenizer, **arguments)
    make = loop.make_environment
    return replace(loop, make_environment=lambda prompt: InMessages(make(prompt)), chat=ChatTurns(tokenizer))
