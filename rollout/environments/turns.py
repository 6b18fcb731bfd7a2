"""The agent loop of an environment that takes turns with the policy, made of what rollout.agent_args says."""

from collections.abc import Callable, Mapping, Sequence
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


def turns(make_environment: Callable[[Prompt], Environment], tokenizer: Any, options: TurnOptions) -> MultiTurn:
    """Make the loop. Raises ValueError for an option that there is not, and what `MultiTurn` and `ChatTurns` raise."""
    chat = ChatTurns(tokenizer) if options.get("chat") else None
    return _loop(make_environment, tokenizer, chat, options, TurnOptions)


def tool_turns(
    make_environment: Callable[[Prompt], Environment], tokenizer: Any, chat: ChatTurns, options: ToolTurnOptions
) -> MultiTurn:
    """Make the loop of an environment with the tools of `chat`, which only a chat template shows."""
    return _loop(make_environment, tokenizer, chat, options, ToolTurnOptions)


def _loop(
    make_environment: Callable[[Prompt], Environment],
    tokenizer: Any,
    chat: ChatTurns | None,
    options: Mapping[str, Any],
    kind: type,
) -> MultiTurn:
    allowed = sorted(kind.__annotations__)
    if unknown := sorted(set(options) - set(allowed)):
        name = unknown[0]
        raise ValueError(f"rollout.agent_args.{name}={options[name]!r}: is no argument; allowed: {', '.join(allowed)}")
    stop = options.get("stop", ())
    if isinstance(stop, str):
        raise ValueError(f"rollout.agent_args.stop={stop}: must be a list of texts")
    defaults = {"max_turns": MAX_TURNS, "step_timeout_s": STEP_TIMEOUT_S}
    return MultiTurn(make_environment, tokenizer, **{**defaults, **options, "stop": tuple(stop), "chat": chat})


def check_tool_limits(call_timeout_s: object, max_output_chars: object, options: ToolTurnOptions) -> None:
    """Raise ValueError where no call can succeed, and where a tool's deadline is no earlier than that of the step that
    it is a part of: the policy would never read that a call took too long."""
    step_timeout_s = options.get("step_timeout_s", STEP_TIMEOUT_S)
    if not isinstance(call_timeout_s, int | float) or not 0 < call_timeout_s < step_timeout_s:
        allowed = f"must be a number above 0, and below step_timeout_s={step_timeout_s}"
        raise ValueError(f"rollout.agent_args.call_timeout_s={call_timeout_s}: {allowed}")
    if not isinstance(max_output_chars, int) or max_output_chars < 1:
        raise ValueError(f"rollout.agent_args.max_output_chars={max_output_chars}: must be a whole number, at least 1")
