"""The arguments that the loops of all adapters have in common: the limits of their episodes."""

from collections.abc import Callable
from typing import Any, TypedDict

from typing_extensions import Unpack

from rollout.agents.environment import Environment
from rollout.agents.multi_turn import Chat, MultiTurn
from rollout.types import Prompt

MAX_TURNS = 8
STEP_TIMEOUT_S = 60.0


class Limits(TypedDict, total=False):
    """Entries of rollout.agent_args; they mean what they do for `MultiTurn`."""

    max_turns: int
    step_timeout_s: float
    max_turn_tokens: int | None
    max_observation_tokens: int | None
    stop: list[str]


def multi_turn(
    make_environment: Callable[[Prompt], Environment],
    tokenizer: Any,
    chat: Chat | None = None,
    **limits: Unpack[Limits],
) -> MultiTurn:
    """A loop within the limits that rollout.agent_args gives. Raises ValueError for an entry that is none of them."""
    unknown = [name for name in limits if name not in Limits.__annotations__]
    if unknown:
        known = ", ".join(Limits.__annotations__)
        raise ValueError(f"rollout.agent_args.{unknown[0]}: the agent loop has no such argument; limits are {known}")
    stop = limits.get("stop", [])
    if isinstance(stop, str):
        raise ValueError(f"rollout.agent_args.stop={stop}: must be a list of texts")
    return MultiTurn(
        make_environment,
        tokenizer,
        max_turns=limits.get("max_turns", MAX_TURNS),
        step_timeout_s=limits.get("step_timeout_s", STEP_TIMEOUT_S),
        max_turn_tokens=limits.get("max_turn_tokens"),
        max_observation_tokens=limits.get("max_observation_tokens"),
        stop=tuple(stop),
        chat=chat,
    )


def check_call_timeout(call_timeout_s: float, limits: Limits) -> None:
    """Raises ValueError where a tool's deadline is no earlier than that of the step which it is a part of: the policy
    would never read that a call took too long."""
    step_timeout_s = limits.get("step_timeout_s", STEP_TIMEOUT_S)
    if call_timeout_s >= step_timeout_s:
        raise ValueError(
            f"rollout.agent_args.call_timeout_s={call_timeout_s}: must be below step_timeout_s={step_timeout_s}"
        )
