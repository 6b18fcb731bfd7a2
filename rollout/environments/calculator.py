"""An example environment: a calculator for arithmetic word problems.

rollout.agent_loop=rollout.environments.calculator:agent_loop
"""

import re
from typing import Any

from rollout.agents.environment import Step
from rollout.agents.multi_turn import MultiTurn
from rollout.types import Prompt

CALL = re.compile(r"calc: *(-?\d{1,9}) *([-+*]) *(-?\d{1,9})\s*$")


class Calculator:
    """One episode. A turn that ends with, for example, `calc: 17 * 3` is answered with the result; any other turn ends
    the episode."""

    def __init__(self, _prompt: Prompt):
        """Take no notice of the prompt."""

    async def step(self, text: str) -> Step:
        call = CALL.search(text)
        if call is None:
            return Step(done=True)
        left, right = int(call[1]), int(call[3])
        result = {"+": left + right, "-": left - right, "*": left * right}[call[2]]
        return Step(observation=f"\n= {result}\n")


def agent_loop(tokenizer: Any) -> MultiTurn:
    return MultiTurn(Calculator, tokenizer, max_turns=4)
