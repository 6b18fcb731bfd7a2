"""What an environment is: the other side of a conversation, or a tool."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one turn of the policy.

    Example: Step(observation="\\n= 12\\n"), then Step(done=True, reward=1.0)
    """

    observation: str = ""
    """What the policy reads next, with everything around it that the chat template wants; special tokens count."""
    done: bool = False
    reward: float | None = None
    """Summed over the episode. If no step gives one, rollout.reward scores the response."""


class Environment(Protocol):
    """The environment of one episode."""

    async def step(self, text: str) -> Step:
        """`text`: the policy's turn, decoded without special tokens. What blocks belongs into `asyncio.to_thread`."""
        ...
