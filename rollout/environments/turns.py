"""The agent loop of an environment that takes turns with the policy, made of what rollout.agent_args says."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Environment
from rollout.agents.multi_turn import MultiTurn
from rollout.types import Prompt

MAX_TURNS = 8
STEP_TIMEOUT_S = 60.0


class ToolTurnOptions(TypedDict, total=False):
    """Options of `MultiTurn` that every adapter takes by the same names, with the same meaning."""

    max_turns: int
    """The most turns of the policy, by default 8."""
    max_turn_tokens: int | None
    max_observation_tokens: int | None
    step_timeout_s: float
    """The deadline of a step, by default 60."""
    stop: Sequence[str]


class TurnOptions(ToolTurnOptions, total=False):
    chat: bool
    """True: observations are messages, written by the model's chat template. False: their texts follow the turn as they
    are."""


def turns(
    make_environment: Callable[[Prompt], Environment],
    tokenizer: Any,
    options: ToolTurnOptions | TurnOptions,
    tools: ChatTurns | None = None,
) -> MultiTurn:
    """Make the loop. `tools`: the chat of an environment with tools, which only a chat template shows.

    Raises ValueError for an option that there is not, and what `MultiTurn` and `ChatTurns` raise.
    """
    values: dict[str, Any] = {"max_turns": MAX_TURNS, "step_timeout_s": STEP_TIMEOUT_S, **options}
    allowed = sorted((TurnOptions if tools is None else ToolTurnOptions).__annotations__)
    if unknown := sorted(set(values) - set(allowed)):
        name = unknown[0]
        raise ValueError(f"rollout.agent_args.{name}={values[name]!r}: is no argument; allowed: {', '.join(allowed)}")
    stop = values.get("stop", ())
    if isinstance(stop, str):
        raise ValueError(f"rollout.agent_args.stop={stop}: must be a list of texts")
    chat = ChatTurns(tokenizer) if values.get("chat") else tools
    return MultiTurn(make_environment, tokenizer, **{**values, "stop": tuple(stop), "chat": chat})


def check_tool_limits(call_timeout_s: object, max_output_chars: object, options: ToolTurnOptions) -> None:
    """Raise ValueError where no call can succeed, and where a tool's deadline is no earlier than that of the step that
    it is a part of: the policy would never read that a call took too long."""
    step_timeout_s = options.get("step_timeout_s", STEP_TIMEOUT_S)
    if not isinstance(call_timeout_s, int | float) or not 0 < call_timeout_s < step_timeout_s:
        allowed = f"must be a number above 0, and below step_timeout_s={step_timeout_s}"
        raise ValueError(f"rollout.agent_args.call_timeout_s={call_timeout_s}: {allowed}")
    if not isinstance(max_output_chars, int) or max_output_chars < 1:
        raise ValueError(f"rollout.agent_args.max_output_chars={max_output_chars}: must be a whole number, at least 1")
