"""Environments of SkyRL-gym (NovaSky-AI/SkyRL): blocking classes with `init`, `step`, `close` and `get_metrics`.

rollout.agent_loop=rollout.environments.skyrl_gym:agent_loop rollout.agent_args.env=gsm8k_multi_turn
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Unpack

from omegaconf import OmegaConf

from configs.runtime.dotted import find
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import OWN_METRICS, MultiTurn
from rollout.chat.messages import Message, Role
from rollout.environments.optional import optional
from rollout.environments.turns import TurnOptions, turns
from rollout.types import Prompt

GROUND_TRUTH_COLUMNS = ("reward_spec", "reward_model")
"""The columns in which SkyRL-gym's environments look for `ground_truth`."""


class SkyRLEnvironment:
    """One episode. Its methods block, so they run where rollout.tools_run_in says; the environment itself is made
    there, too.

    The reward is the sum of what the steps give.
    """

    def __init__(self, make: Callable[[], Any], prompt: Prompt, *, is_chat: bool, allow_postprocessed: bool):
        self._make, self._prompt = make, prompt
        self._is_chat, self._allow_postprocessed = is_chat, allow_postprocessed
        self._env: Any = None
        """A `skyrl_gym.envs.base_text_env.BaseTextEnv`, or a class with the same methods. Its messages are dicts."""

    def reset(self) -> Observation:
        """Return what `init` adds to the prompt. Raises ValueError where it changes the prompt."""
        self._env = self._make()
        prompt = [{"role": "user", "content": self._prompt.text}]
        messages, _ = self._env.init([dict(message) for message in prompt])
        if [dict(message) for message in messages[:1]] != prompt:
            raise ValueError(
                f"init of {type(self._env).__name__} changes the prompt to {messages!r:.200}; it may only add messages"
                " after it. Put what it says into data.prompt_template, or into the messages of the data"
            )
        return self._observed(messages[1:])

    def step(self, turn: Turn, /) -> Step:
        """Take a step. Raises ValueError for a postprocessed action that is not allowed, and for what is no step."""
        assert self._env is not None
        action = str(turn)
        taken = self._env.step(action)
        missing = [key for key in ("observations", "reward", "done") if key not in taken]
        if missing:
            raise ValueError(f"a step of {type(self._env).__name__} has no {missing[0]!r}; it has {sorted(taken)}")
        return Step(
            observation="" if taken["done"] else self._observed(taken["observations"] or ()),
            done=bool(taken["done"]),
            reward=float(taken["reward"]),
            metrics=_numbers(self._env.get_metrics()),
            counts={"postprocessed_actions": float(self._is_postprocessed(action, taken))},
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _is_postprocessed(self, action: str, taken: Mapping[str, Any]) -> bool:
        """Return whether the environment would have the policy's turn read otherwise than it was sampled."""
        instead = taken.get("postprocessed_action")
        if instead is None or instead == action:
            return False
        if not self._allow_postprocessed:
            raise ValueError(
                f"{type(self._env).__name__} changed the turn {action[-100:]!r} to {instead[-100:]!r} by"
                " postprocessed_action. What is trained is what was sampled: end turns where the environment cuts them"
                " (rollout.agent_args.stop), or set rollout.agent_args.allow_postprocessed=true to keep the sampled"
                " tokens all the same"
            )
        return True

    def _observed(self, messages: Sequence[Mapping[str, str]]) -> Observation:
        if not self._is_chat:
            return "".join(message["content"] for message in messages)
        return [Message(role=Role(message["role"]), content=message["content"]) for message in messages]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the metrics. One that has a name of `MultiTurn`'s own gets the prefix `env_`."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    return {f"env_{name}" if name in OWN_METRICS else name: value for name, value in numbers.items()}


def _maker(env: str) -> Callable[..., Any]:
    """Return what makes environments of env_config and extras. Raises ImportError and ValueError."""
    if ":" in env:
        return find("rollout.agent_args.env", env, (), named=("env_config", "extras"))
    gym = optional("skyrl_gym", "skyrl-gym")
    if env not in gym.registry:
        known = ", ".join(sorted(gym.registry))
        raise ValueError(f"rollout.agent_args.env={env}: must be one of {known}, or package.module:Class")
    return partial(gym.make, env)


def agent_loop(
    tokenizer: Any,
    *,
    env: str,
    env_config: Mapping[str, Any] | None = None,
    allow_postprocessed: bool = False,
    **options: Unpack[TurnOptions],
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args.

    Args:
        env: A name that skyrl_gym knows, or the `package.module:Class` of an environment, for which skyrl_gym need not
            be installed.
        env_config: The env_config of the environment.
        allow_postprocessed: True lets an environment return a postprocessed_action that differs from the turn. The
            sampled tokens are kept all the same, and agent/postprocessed_actions counts them.
        options: The options of a loop; `chat` is SkyRL's use_conversation_multi_turn; the environment is told
        `max_turns`, too.

    Raises:
        ImportError: skyrl_gym is not installed.
        ValueError: There is no such environment, or no such option.
    """
    make, settings = _maker(env), OmegaConf.create(dict(env_config or {}))
    is_chat = options.get("chat", False)

    def make_environment(prompt: Prompt) -> SkyRLEnvironment:
        truths = {column: {"ground_truth": prompt.ground_truth} for column in GROUND_TRUTH_COLUMNS}
        row = {"data_source": prompt.data_source, "extra_info": {}, **truths, **prompt.extra}  # as SkyRL's generator
        made = partial(make, env_config=settings, extras={**row, "max_turns": loop.max_turns})
        return SkyRLEnvironment(made, prompt, is_chat=is_chat, allow_postprocessed=allow_postprocessed)

    loop = turns(make_environment, tokenizer, options)
    return loop
