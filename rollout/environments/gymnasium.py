"""Environments of Gymnasium (https://gymnasium.farama.org) as environments of episodes: text in, text out.

rollout.agent_loop=rollout.environments.gymnasium:agent_loop rollout.agent_args.env=slipstream/House-v0
rollout.max_response_tokens=1024
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from configs.runtime.dotted import find, import_user_module
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import Message, Role
from rollout.environments.optional import optional
from rollout.environments.turns import TurnOptions, turns
from rollout.rewards.outcome import described
from rollout.types import Prompt

HOUSE = "slipstream/House-v0"
"""The example that comes with this project: rollout/environments/text_world.py."""
KEY = "rollout.agent_args"
_NUMBER = re.compile(r"-?\d+")
Observe = Callable[[Any], str]
Act = Callable[[str], Any]
"""Makes an action of a text. Raises ValueError for a text that is none; the policy reads why."""


class GymnasiumEnvironment:
    """One episode. Its methods block, and so run where rollout.tools_run_in says."""

    def __init__(self, prompt: Prompt, make: Callable[[], Any], observe: Observe | None, act: Act, is_chat: bool):
        """`make` makes the environment of Gymnasium. `observe`: None takes its ansi rendering, if it has one."""
        self._seed = read_seed(prompt)
        self._make, self._observe, self._act, self._is_chat = make, observe, act, is_chat
        self._env: Any = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def reset(self) -> Observation:
        env = self._make()
        with self._lock:
            self._env = env
            if self._is_closed:  # making it took too long: the episode has ended, and its close has run before
                env.close()
                return ""
        observation, _ = env.reset(seed=self._seed)
        return self._shown(self._text(observation))

    def step(self, turn: Turn, /) -> Step:
        try:
            action = self._act(turn.content.strip())
        except ValueError as error:
            hint = self._shown(f"Invalid action: {error}")
            return Step(observation=hint, reward=0.0, counts={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(
            observation=self._shown(self._text(observation)),
            done=bool(terminated or truncated),
            reward=float(reward),
            metrics={"terminated": float(terminated), "truncated": float(truncated)},
            counts={"invalid_actions": 0.0},
        )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._env is not None:
                self._env.close()

    def _text(self, observation: Any) -> str:
        if self._observe is not None:
            return self._observe(observation)
        return self._env.render() if self._env.render_mode == "ansi" else as_text(observation)

    def _shown(self, text: str) -> Observation:
        return [Message(role=Role.user, content=text)] if self._is_chat else f"\n{text.strip()}\n"


def read_seed(prompt: Prompt) -> int:
    """Return the seed of the world: the row's column `seed`, else the prompt's place in the stream. A group shares it.
    A row without one has null there, where other rows of a parquet file have one."""
    seed = prompt.extra.get("seed")
    return prompt.ordinal if seed is None else int(seed)


def as_text(observation: Any) -> str:
    """Return a text as it is, anything else as JSON, arrays as lists.

    Example: as_text((14, np.array([1, 0]))) == "[14, [1, 0]]"
    """
    return observation if isinstance(observation, str) else json.dumps(observation, default=_listed)


def _listed(value: Any) -> Any:
    return value.tolist()  # of an array, or of one of its numbers


# -- actions -----------------------------------------------------------------------------------------------------------


def act_in(space: Any, actions: Sequence[str] = ()) -> Act:
    """Return what makes an action of `space` out of a text. In a text space it is the text itself. In a discrete one it
    is the number that comes last in the text, or with `actions`, the names of the numbers in their order, the name.

    Raises:
        ValueError: The space is another one, or there are not as many names as actions.
    """
    spaces: Any = optional("gymnasium.spaces", "gymnasium")
    if isinstance(space, spaces.Text) and not actions:
        return _TextAction(space)
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"{KEY}.act=null: actions are {space}, which needs package.module:function, and no `actions`")
    if actions and len(actions) != space.n:
        raise ValueError(f"{KEY}.actions={list(actions)}: must be the names of {space.n} actions")
    numbers = range(int(space.start), int(space.start + space.n))
    if not actions:
        known = {str(number): number for number in numbers}
        return _LastAction(_NUMBER, known, f"a number of {space}")
    known = {name.lower(): number for name, number in zip(actions, numbers, strict=True)}
    longest_first = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)")
    return _LastAction(pattern, known, f"one of {', '.join(actions)}")


@dataclass(frozen=True, slots=True)
class _LastAction:
    """Reads the action that a text names last."""

    pattern: re.Pattern[str]
    numbers: Mapping[str, int]
    """The number of each action, by its name in lower case."""
    allowed: str

    def __call__(self, text: str) -> int:
        names = self.pattern.findall(text.lower())
        if not names or names[-1] not in self.numbers:
            raise ValueError(f"say {self.allowed}")
        return self.numbers[names[-1]]


@dataclass(frozen=True, slots=True)
class _TextAction:
    """Takes the text itself as the action, where the space has it."""

    space: Any

    def __call__(self, text: str) -> str:
        shortest, longest = self.space.min_length, self.space.max_length
        if not shortest <= len(text) <= longest:
            raise ValueError(f"it has {len(text)} characters, and may have {shortest} to {longest}")
        if not self.space.contains(text):
            unknown = "".join(sorted(set(text) - self.space.character_set))
            raise ValueError(f"it may not have the characters {unknown!r}")
        return text


# -- the loop ----------------------------------------------------------------------------------------------------------


def agent_loop(
    tokenizer: Any,
    *,
    env: str,
    env_args: Mapping[str, Any] | None = None,
    observe: str | None = None,
    act: str | None = None,
    actions: Sequence[str] = (),
    **options: Unpack[TurnOptions],
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args. With chat=true actions are read without the reasoning.

    Args:
        tokenizer: The tokenizer of transformers.
        env: The id of an environment, such as FrozenLake-v1, or with the module that registers it,
            such as my_envs:Maze-v0.
        env_args: Arguments of `gymnasium.make`, such as max_episode_steps or render_mode; with render_mode=ansi the
            policy reads the rendering.
        observe: `package.module:function` that makes a text of an observation; None is `as_text`.
        act: `package.module:function` that makes an action of a text, or raises ValueError; None is `act_in`.
        actions: The names of discrete actions.

    Raises:
        ImportError: There is no gymnasium.
        ValueError: An argument is wrong, or no environment can be made of them.
    """
    env_args = dict(env_args or {})
    make, space = _maker(env, env_args)
    observe_with = None if observe is None else find(f"{KEY}.observe", observe, ("observation",))
    act_with = act_in(space, actions) if act is None else find(f"{KEY}.act", act, ("text",))
    is_chat = options.get("chat", False)
    return turns(lambda prompt: GymnasiumEnvironment(prompt, make, observe_with, act_with, is_chat), tokenizer, options)


def _maker(env: str, env_args: dict[str, Any]) -> tuple[Callable[[], Any], Any]:
    """Return what makes an environment, and its actions: one is made at once, to see that it can be. Raises ValueError,
    and ImportError where there is no gymnasium."""
    gymnasium: Any = optional("gymnasium", "gymnasium")
    if HOUSE not in gymnasium.registry:
        gymnasium.register(HOUSE, "rollout.environments.text_world:make_house", max_episode_steps=100)
    module, _, name = env.rpartition(":")
    if module:
        try:
            import_user_module(module)
        except Exception as error:
            raise ValueError(f"{KEY}.env={env}: {module} cannot be imported: {described(error)}") from error
    try:
        spec = gymnasium.spec(name)  # by which another process can make it, too, whatever was registered there
        make = partial(gymnasium.make, spec, **env_args)
        made = make()
    except Exception as error:
        raise ValueError(f"{KEY}.env={env}, env_args={env_args}: cannot be made: {described(error)}") from error
    made.close()
    return make, made.action_space
