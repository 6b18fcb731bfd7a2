"""Environments of Gymnasium (https://gymnasium.farama.org) as environments of episodes: text in, text out.

rollout.agent_loop=rollout.environments.gymnasium:agent_loop rollout.agent_args.env=slipstream/House-v0
rollout.max_response_tokens=1024
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from configs.runtime.dotted import find, import_user_module
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.environments.optional import optional
from rollout.environments.turns import TurnOptions, turns
from rollout.rewards.outcome import described
from rollout.sessions.messages import Message, Role
from rollout.types import Prompt

HOUSE = "slipstream/House-v0"
"""The example that is shipped: rollout/environments/text_world.py."""
KEY = "rollout.agent_args"
_NUMBER = re.compile(r"-?\d+")
Observe = Callable[[Any], str]
Act = Callable[[str], Any]
"""Raises ValueError for a text that is no action; the policy reads why."""


class GymnasiumEnvironment:
    """One episode. Its methods block, and so run in threads."""

    def __init__(self, prompt: Prompt, make: Callable[[], Any], observe: Observe | None, act: Act, is_chat: bool):
        """`make`: the environment of Gymnasium. `observe`: None asks its ansi rendering, if it has one."""
        self._seed = seed_of(prompt)
        self._make, self._observe, self._act, self._is_chat = make, observe, act, is_chat
        self._env: Any = None
        self._is_closed = False
        self._lock = threading.Lock()

    def reset(self) -> Observation:
        env = self._make()
        with self._lock:
            self._env = env
            if self._is_closed:  # making it took too long, and nobody waits
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


def seed_of(prompt: Prompt) -> int:
    """The seed of the world: the row's column `seed`, else the prompt's place in the stream. A group shares it."""
    return int(prompt.extra.get("seed", prompt.ordinal))


def as_text(observation: Any) -> str:
    """A text as it is, anything else as JSON; arrays as lists.

    Example: as_text((14, np.array([1, 0]))) == "[14, [1, 0]]"
    """
    return observation if isinstance(observation, str) else json.dumps(observation, default=_listed)


def _listed(value: Any) -> Any:
    return value.tolist()  # of an array, or of one of its numbers


# -- actions -----------------------------------------------------------------------------------------------------------


def act_in(space: Any, actions: Sequence[str] = ()) -> Act:
    """How a text is an action of `space`. Of a text space it is the text itself. Of a discrete one it is the number
    that comes last in the text, or with `actions`, which are the names of the numbers in their order, the name.

    Raises:
        ValueError: another space, or not as many names as actions.
    """
    spaces: Any = optional("gymnasium.spaces", "gymnasium")
    if isinstance(space, spaces.Text) and not actions:
        return lambda text: _in_text_space(space, text)
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"{KEY}.act=null: actions are {space}, which needs package.module:function, and no `actions`")
    if actions and len(actions) != space.n:
        raise ValueError(f"{KEY}.actions={list(actions)}: must be the names of {space.n} actions")
    numbers = range(int(space.start), int(space.start + space.n))
    if not actions:
        return lambda text: _last(_NUMBER, text, {str(number): number for number in numbers}, f"a number of {space}")
    known = {name.lower(): number for name, number in zip(actions, numbers, strict=True)}
    longest_first = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)")
    return lambda text: _last(pattern, text, known, f"one of {', '.join(actions)}")


def _last(pattern: re.Pattern[str], text: str, known: Mapping[str, int], allowed: str) -> int:
    found = pattern.findall(text.lower())
    if not found or found[-1] not in known:
        raise ValueError(f"say {allowed}")
    return known[found[-1]]


def _in_text_space(space: Any, text: str) -> str:
    if not space.min_length <= len(text) <= space.max_length:
        raise ValueError(f"it has {len(text)} characters, and may have {space.min_length} to {space.max_length}")
    if not space.contains(text):
        raise ValueError(f"it may not have the characters {''.join(sorted(set(text) - space.character_set))!r}")
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
    """Arguments are those of rollout.agent_args. With chat=true actions are read without the reasoning.

    Args:
        tokenizer: Of transformers.
        env: The id of an environment, such as FrozenLake-v1, or with the module that registers it,
            such as my_envs:Maze-v0.
        env_args: Arguments of `gymnasium.make`, such as max_episode_steps or render_mode; with render_mode=ansi the
            policy reads the rendering.
        observe: `package.module:function` that makes a text of an observation; null is `as_text`.
        act: `package.module:function` that makes an action of a text, or raises ValueError; null is `act_in`.
        actions: The names of discrete actions.

    Raises:
        ImportError: There is no gymnasium.
        ValueError: An argument is wrong, or no environment can be made of them.
    """
    env_args = dict(env_args or {})
    make = _maker(env, env_args)
    space = _action_space(make, env, env_args)
    observe_with = None if observe is None else find(f"{KEY}.observe", observe, ("observation",))
    act_with = act_in(space, actions) if act is None else find(f"{KEY}.act", act, ("text",))
    is_chat = options.get("chat", False)
    return turns(lambda prompt: GymnasiumEnvironment(prompt, make, observe_with, act_with, is_chat), tokenizer, options)


def _maker(env: str, env_args: Mapping[str, Any]) -> Callable[[], Any]:
    gymnasium: Any = optional("gymnasium", "gymnasium")
    if HOUSE not in gymnasium.registry:
        gymnasium.register(HOUSE, "rollout.environments.text_world:make_house", max_episode_steps=100)
    module, _, name = env.rpartition(":")
    if module:
        try:
            import_user_module(module)
        except Exception as error:
            raise ValueError(f"{KEY}.env={env}: {module} cannot be imported: {described(error)}") from error
    return lambda: gymnasium.make(name, **env_args)


def _action_space(make: Callable[[], Any], env: str, env_args: Mapping[str, Any]) -> Any:
    """Of an environment that is made only to see that one can be."""
    try:
        made = make()
    except Exception as error:
        raise ValueError(f"{KEY}.env={env}, env_args={dict(env_args)}: cannot be made: {described(error)}") from error
    made.close()
    return made.action_space
