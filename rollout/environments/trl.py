"""Environment classes as TRL's `environment_factory` takes them: their public methods are the tools of an episode
(https://huggingface.co/docs/trl/openenv). TRL itself is not needed.

rollout.agent_loop=rollout.environments.trl:agent_loop rollout.agent_args.factory=my_env:MyEnv
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType
from typing import Any, Unpack

from configs.runtime.dotted import find
from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.threads import called
from rollout.agents.tools import Tool, Toolbox, ToolEnvironment
from rollout.chat.messages import Message, Role
from rollout.environments.turns import MAX_TURNS, STEP_TIMEOUT_S, ToolTurnOptions, check_tool_limits, turns
from rollout.types import Prompt

KEY = "rollout.agent_args"
NO_TOOLS = ("reset", "close", "reward", "get_reward")
"""Public methods that the policy is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the episodes of a loop share."""

    make: Callable[[], Any]
    """Makes an instance of the class."""
    kind: type
    """The class, whose methods are the tools."""
    call_timeout_s: float
    max_output_chars: int
    step_timeout_s: float
    max_turns: int


class ClassEnvironment:
    """One episode with an instance of such a class. Its plain methods run in threads, one call after another; with
    rollout.tools_run_in=process, in those of a process that has the whole environment.

    The reward is what its `reward` is, or what its method `reward` or `get_reward` returns. An attribute is looked at
    after every turn: what it has gained since the turn before is the reward of the turn. A method is asked after the
    last turn. Where there is neither, or it is None, rollout.reward scores the episode.
    """

    has_plain_methods = True

    def __init__(self, prompt: Prompt, settings: Settings):
        self._prompt, self._settings = prompt, settings
        self._instance: Any = None
        self._answers: ToolEnvironment | None = None
        self._num_turns = 0
        self._rewarded = 0.0

    async def reset(self) -> Observation:
        settings = self._settings
        self._instance = await self._called(settings.make)
        toolbox = Toolbox(
            [
                replace(tool, function=getattr(self._instance, name))
                for name, tool in build_tools(settings.kind).items()
            ],
            call_timeout_s=settings.call_timeout_s,
            max_output_chars=settings.max_output_chars,
        )
        self._answers = ToolEnvironment(toolbox, in_order=True)
        reset = self._instance.reset
        text = await self._called(reset, **row_for(reset, self._prompt))
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned {text!r:.100}, and neither a text nor None")
        return [Message(role=Role.user, content=text)] if text else ""

    async def step(self, turn: Turn, /) -> Step:
        assert self._answers is not None
        step = await self._answers.step(turn)
        self._num_turns += 1
        is_last = step.done or self._num_turns == self._settings.max_turns
        return replace(step, reward=await self._reward(is_last))

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        if close is not None:
            await self._called(close)

    async def _reward(self, is_last: bool) -> float | None:
        """Return the reward of the turn. Raises TypeError and ValueError for what is no number."""
        reward = getattr(self._instance, "reward", None)
        if reward is None:
            reward = getattr(self._instance, "get_reward", None)
        if callable(reward):
            reward = await self._called(reward) if is_last else None
        if reward is None:
            return None
        gained, self._rewarded = float(reward) - self._rewarded, float(reward)
        return gained

    async def _called(self, function: Callable[..., Any], **arguments: Any) -> Any:
        timeout_s = self._settings.step_timeout_s
        return await called(function, timeout_s, "step_timeout_s", "a method of the environment", **arguments)


def row_for(reset: Callable[..., Any], prompt: Prompt) -> dict[str, Any]:
    """Return the columns of the prompt's row by name, with `prompt` and `answer` for those of its text and its ground
    truth: all of them, or only those that `reset` names if it has no **kwargs."""
    row = {"prompt": prompt.text, "answer": prompt.ground_truth, "ground_truth": prompt.ground_truth} | prompt.extra
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return row
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}


@cache
def build_tools(kind: type) -> Mapping[str, Tool]:
    """Return the public methods of a class as tools, in their order; the functions belong to no instance yet. Raises
    ValueError as `Tool.of` does."""
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return {
        name: Tool.of(member.__get__(object(), kind))  # without its `self`
        for name, member in members.items()
        if isinstance(member, FunctionType) and not name.startswith("_") and name not in NO_TOOLS
    }


def agent_loop(
    tokenizer: Any,
    *,
    factory: str,
    args: Mapping[str, Any] | None = None,
    call_timeout_s: float = 30.0,
    max_output_chars: int = 8192,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **options: Unpack[ToolTurnOptions],
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args.

    Args:
        tokenizer: The tokenizer of transformers, with a chat template that shows tools.
        factory: `package.module:Class`, or a function that makes an instance of one.
        args: Arguments of the factory.
        call_timeout_s: The deadline of each call of a tool.
        max_output_chars: The characters of a result that the policy reads.
        tool_parser: The parser of calls, as in sessions.tool_parser.
        reasoning_parser: The parser of reasoning, as in sessions.reasoning_parser.

    Raises:
        ValueError: An argument is wrong, or the class has no `reset`, no tools, or one that no schema describes.
    """
    check_tool_limits(call_timeout_s, max_output_chars, options)
    args = dict(args or {})
    make = find(f"{KEY}.factory", factory, (), named=args)
    kind = make if isinstance(make, type) else type(make(**args))
    tools = build_tools(kind)
    if getattr(kind, "reset", None) is None or not tools:
        raise ValueError(
            f"{KEY}.factory={factory}: {kind.__name__} needs a method reset, and others that are the tools"
        )
    settings = Settings(
        make=partial(make, **args),
        kind=kind,
        call_timeout_s=call_timeout_s,
        max_output_chars=max_output_chars,
        step_timeout_s=options.get("step_timeout_s", STEP_TIMEOUT_S),
        max_turns=options.get("max_turns", MAX_TURNS),
    )
    specs = [tool.spec for tool in tools.values()]
    chat = ChatTurns(tokenizer, specs, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    return turns(lambda prompt: ClassEnvironment(prompt, settings), tokenizer, options, chat)
