"""The tools `python` and `bash`, which run what a policy writes in the sandbox of its episode, and the agent loop over
them. A row that is a task of Harbor's form brings its files, and its tests give the reward; other rows are scored by
rollout.reward.

rollout.agent_loop=rollout.environments.sandbox.tools:agent_loop data.chat_template=true
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tools import Tool, Toolbox, ToolEnvironment, ToolResult
from rollout.chat.messages import ToolCall, ToolSpec
from rollout.environments.sandbox.harbor import Task, set_up, task_of, verified
from rollout.environments.sandbox.launching import HOME
from rollout.environments.sandbox.sandbox import Sandbox, SandboxLostError
from rollout.environments.sandbox.sandboxes import sandbox_config, sandboxes
from rollout.environments.turns import MAX_TURNS, ToolTurnOptions, turns
from rollout.types import Prompt

KEY = "rollout.agent_args"
NAMES = ("python", "bash")
MARGIN_S = 15.0
"""The time of a step beyond what its commands may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the episodes of a loop share."""

    tools: tuple[Tool, ...]
    """The tools, which belong to no sandbox yet."""
    max_output_chars: int
    max_turns: int
    turn_timeout_s: float
    """The deadline of all commands of a turn, and of the tests of a task."""


class SandboxCommands:
    """The functions of the tools in the sandbox of an episode. They raise what is not the policy's fault."""

    def __init__(self, sandbox: Sandbox, task: Task | None):
        self.sandbox, self.timeout_s = sandbox, 0.0
        self._cwd, self._env = (HOME, None) if task is None else (task.workdir, task.env)

    async def python(self, code: str) -> str:
        """Run a Python program in a sandbox, and return what it prints.

        Args:
            code: The program. Only what it prints is returned.
        """
        return await self._run(["python3", "-"], code.encode("utf-8", "replace"))

    async def bash(self, command: str) -> str:
        """Run a command of the shell in a sandbox, and return what it prints.

        Args:
            command: The command. Files stay for later commands; variables and the current folder do not.
        """
        return await self._run(["bash", "-c", command])

    async def _run(self, argv: Sequence[str], stdin: bytes = b"") -> str:
        outcome = await self.sandbox.exec(argv, stdin=stdin, cwd=self._cwd, env=self._env, timeout_s=self.timeout_s)
        return outcome.text()


class SandboxTools:
    """The tools of one episode, of which a turn gets only so much time: what is left for a call is its deadline. An
    episode whose tools raise has no reward."""

    def __init__(self, sandbox: Sandbox, task: Task | None, settings: Settings):
        self._commands, self._config = SandboxCommands(sandbox, task), sandbox.config
        self._turn_timeout_s, self._until = settings.turn_timeout_s, 0.0
        self._toolbox = Toolbox(
            [replace(tool, function=getattr(self._commands, tool.spec.name)) for tool in settings.tools],
            call_timeout_s=self._config.timeout_s + self._config.answer_timeout_s + MARGIN_S,
            max_output_chars=settings.max_output_chars,
        )

    def begin_turn(self) -> None:
        self._until = asyncio.get_running_loop().time() + self._turn_timeout_s

    def specs(self) -> Sequence[ToolSpec]:
        return self._toolbox.specs()

    async def result(self, call: ToolCall) -> ToolResult:
        left = self._until - asyncio.get_running_loop().time()
        if left <= 0:
            text = f"Error: not run: the calls before it took turn_timeout_s={self._turn_timeout_s:g}"
            return ToolResult(text=text, is_error=True)
        self._commands.timeout_s = min(left, self._config.timeout_s)
        result = await self._toolbox.result(call)
        if self._commands.sandbox.is_lost:  # what the toolbox takes for a failure of the call
            raise SandboxLostError(f"the sandbox of the episode is gone: {result.text}")
        return result


def make_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools of these names, unbound. Raises ValueError for a name that there is not."""
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"{KEY}.tools={list(names)}: {unknown[0]!r} is none; allowed: {', '.join(NAMES)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{KEY}.tools={list(names)}: must name at least one of {', '.join(NAMES)}, and each once")
    unbound = SandboxCommands.__new__(SandboxCommands)
    return tuple(Tool.of(getattr(unbound, name)) for name in names)


class SandboxEnvironment:
    """One episode in a sandbox, which it has from its `reset` to its `close`."""

    def __init__(self, prompt: Prompt, settings: Settings):
        self._prompt, self._settings = prompt, settings
        self._task: Task | None = None
        self._sandbox: Sandbox | None = None
        self._tools: SandboxTools | None = None
        self._answers: ToolEnvironment | None = None
        self._num_turns = 0

    async def reset(self) -> Observation:
        pool = sandboxes()
        task = self._task = task_of(self._prompt)
        sandbox = self._sandbox = await pool.take(None if task is None else task.image(pool.config))
        if task is not None:
            await set_up(sandbox, task)
        self._tools = SandboxTools(sandbox, task, self._settings)
        self._answers = ToolEnvironment(self._tools, in_order=True)
        return ""

    async def step(self, turn: Turn, /) -> Step:
        assert self._answers is not None and self._tools is not None and self._sandbox is not None
        self._num_turns += 1
        self._tools.begin_turn()
        step = await self._answers.step(turn)
        if self._task is None or not (step.done or self._num_turns == self._settings.max_turns):
            return step
        timeout_s = min(self._settings.turn_timeout_s, self._task.verifier_timeout_s)
        verdict = await verified(self._sandbox, self._task, timeout_s)
        return replace(step, reward=verdict.reward, metrics=verdict.metrics)

    async def close(self) -> None:
        if self._sandbox is not None:
            sandboxes().give_back(self._sandbox)
            self._sandbox = None


def agent_loop(
    tokenizer: Any,
    *,
    tools: Sequence[str] = NAMES,
    max_turns: int = MAX_TURNS,
    max_turn_tokens: int | None = None,
    max_output_chars: int = 8192,
    turn_timeout_s: float = 120.0,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args.

    Args:
        tokenizer: The tokenizer of transformers, with a chat template that shows tools.
        tools: The tools that the policy has: python, bash or both.
        max_turns: The most turns of the policy.
        max_turn_tokens: The most tokens of a turn.
        max_output_chars: The characters of a result that the policy reads.
        turn_timeout_s: The deadline of all commands of a turn, and of the tests of a task.
        tool_parser: The parser of calls, as in sessions.tool_parser.
        reasoning_parser: The parser of reasoning, as in sessions.reasoning_parser.

    Raises:
        ValueError: An argument is wrong.
    """
    config = sandbox_config()
    if not isinstance(turn_timeout_s, int | float) or turn_timeout_s <= 0:
        raise ValueError(f"{KEY}.turn_timeout_s={turn_timeout_s}: must be a number above 0")
    if not isinstance(max_output_chars, int) or max_output_chars < 1:
        raise ValueError(f"{KEY}.max_output_chars={max_output_chars}: must be a whole number, at least 1")
    made = make_tools(tools)
    settings = Settings(
        tools=made, max_output_chars=max_output_chars, max_turns=max_turns, turn_timeout_s=turn_timeout_s
    )
    specs = [tool.spec for tool in made]
    chat = ChatTurns(tokenizer, specs, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    # A step may use its calls' time and then that of the tests; a reset waits for a sandbox and starts one.
    waits_s = config.wait_timeout_s + config.start_timeout_s + config.answer_timeout_s
    step_timeout_s = 2 * turn_timeout_s + waits_s + MARGIN_S
    options = ToolTurnOptions(max_turns=max_turns, max_turn_tokens=max_turn_tokens, step_timeout_s=step_timeout_s)
    return turns(lambda prompt: SandboxEnvironment(prompt, settings), tokenizer, options, chat)
