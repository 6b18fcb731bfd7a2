"""An environment that answers three times with what it heard, so that episodes have tokens nobody sampled."""

from typing import Any

from rollout.agents.environment import Step
from rollout.agents.multi_turn import MultiTurn
from rollout.types import Prompt


class Echo:
    def __init__(self, prompt: Prompt):
        self.turns = 0

    async def step(self, text: str) -> Step:
        self.turns += 1
        return Step(done=self.turns == 3, reward=float(len(text) % 2), observation=f"\nYou said {len(text)}: ")


def agent_loop(tokenizer: Any) -> MultiTurn:
    return MultiTurn(Echo, tokenizer, max_turns=3)
