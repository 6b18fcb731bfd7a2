"""The agent loop of an environment that takes turns with the policy, made of what rollout.agent_args says."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from rollout.agents.environment import Environment
from rollout.agents.multi_turn import MultiTurn
from rollout.sessions.chat_turns import ChatTurns
from rollout.types import Prompt


class TurnOptions(TypedDict, total=False):
    """Options of `MultiTurn` that every adapter takes by the same names, with the same meaning."""

    max_turns: int
    """8 unless given."""
    max_turn_tokens: int | None
    max_observation_tokens: int | None
    step_timeout_s: float
    stop: Sequence[str]
    chat: bool
    """Whether observations are messages, written by the model's chat template; false: their texts follow the turn as
    they are."""


def turns(make_environment: Callable[[Prompt], Environment], tokenizer: Any, options: TurnOptions) -> MultiTurn:
    """Raises ValueError for an option that there is not, and what `MultiTurn` and `ChatTurns` raise."""
    allowed = sorted(TurnOptions.__annotations__)
    if unknown := sorted(set(options) - set(allowed)):
        name = unknown[0]
        raise ValueError(f"rollout.agent_args.{name}={options[name]!r}: is no argument; allowed: {', '.join(allowed)}")
    given: dict[str, Any] = {"max_turns": 8, **options}
    given["stop"] = tuple(given.get("stop", ()))
    given["chat"] = ChatTurns(tokenizer) if given.get("chat") else None
    return MultiTurn(make_environment, tokenizer, **given)
