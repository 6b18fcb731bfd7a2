"""Agent loops of environments and tools that the config names, for those who write no agent loop themselves.

rollout.agent_loop=rollout.environments.named:environment rollout.agent_args.environment=my_env:Guess
rollout.agent_loop=rollout.environments.named:tools rollout.agent_args.tools=[my_tools:add,my_tools:search]
"""

from collections.abc import Sequence
from typing import Any

from configs.runtime.dotted import find, find_callable
from rollout.agents.chat_turns import ChatTurns
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tools import Toolbox, ToolEnvironment

MAX_TURNS = 8


def environment(tokenizer: Any, *, environment: str, max_turns: int = MAX_TURNS) -> MultiTurn:
    """Make a loop of a class, or a function of (prompt), `package.module:name`, that makes an environment."""
    make = find("rollout.agent_args.environment", environment, ("prompt",))
    return MultiTurn(make, tokenizer, max_turns=max_turns)


def tools(tokenizer: Any, *, tools: Sequence[str], max_turns: int = MAX_TURNS) -> MultiTurn:
    """Make a loop in which the policy may call functions, each a `package.module:function`, by the chat template."""
    if not tools:
        raise ValueError("rollout.agent_args.tools=[]: must name a function")
    toolbox = Toolbox([find_callable("rollout.agent_args.tools", path) for path in tools])
    chat = ChatTurns(tokenizer, toolbox.specs())
    return MultiTurn(lambda prompt: ToolEnvironment(toolbox), tokenizer, max_turns=max_turns, chat=chat)
