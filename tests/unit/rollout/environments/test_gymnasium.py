"""Environments of Gymnasium as environments of episodes: its own, the house that is shipped, and made-up ones."""

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rollout.agents.loop import Episode, load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from rollout.environments.gymnasium import HOUSE, act_in, agent_loop, as_text
from rollout.environments.text_world import DIRECTIONS, OPPOSITE
from tests.support.environments import TOKENIZER, error_of, heard, play, played_in_both_places, prompt_of
from tests.support.sequences import only

LAKE = ["left", "down", "right", "up"]


def explorer() -> Callable[[str], str]:
    """A policy that opens the door: it walks through the rooms as through a tree, with the key once more."""
    here, has_key = "", False
    back: list[str] = []
    """The way to where it began."""
    left: dict[str, list[str]] = {}
    """The ways of each room that it has not gone yet."""

    def say(text: str) -> str:
        nonlocal here, has_key
        here = text[text.rindex("You are in the") :] if "You are in the" in text else here
        if "You have the key." in text:
            has_key = True
            back.clear()
            left.clear()
        if "There is a key." in here and not has_key:
            return "take key"
        if "There is a locked door." in here and has_key:
            return "unlock door"
        room, ways, *_ = here.split(".")
        come_from = back[-1:]
        new = left.setdefault(room, [way for way in re.findall("|".join(DIRECTIONS), ways) if way not in come_from])
        if not new:
            return f"go {back.pop()}"
        back.append(OPPOSITE[new[-1]])
        return f"go {new.pop()}"

    return say


class Counter(gymnasium.Env[Any, Any]):
    """Counts what becomes of it. An action that is its sum so far ends it."""

    observation_space = spaces.Dict({"sum": spaces.Discrete(1000)})
    action_space = spaces.Discrete(5, start=1)
    events: list[str] = []
    seconds = 0.0

    def __init__(self, error: str = "", seconds: float = 0.0):
        self.error, self.seconds = error, seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.events.append(f"reset {seed}")
        time.sleep(self.seconds)
        self.sum = 0
        return {"sum": self.sum}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.error:
            raise OSError(self.error)
        is_end = action == self.sum
        self.sum += action
        return {"sum": self.sum}, action / 2, is_end, False, {}

    def close(self) -> None:
        self.events.append("close")


@pytest.fixture(autouse=True)
def counter() -> Any:
    """Registered for one test."""
    gymnasium.register("Counter-v0", Counter, max_episode_steps=3, disable_env_checker=True)
    yield
    del gymnasium.registry["Counter-v0"]
    Counter.events.clear()


def loop_of(**args: Any) -> MultiTurn:
    return agent_loop(TOKENIZER, **args)


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_an_explorer_opens_the_door_of_every_house(chat: bool) -> None:
    loop = loop_of(env=HOUSE, max_turns=100, chat=chat)
    for ordinal in range(8):
        episode = play(loop, explorer(), prompt=prompt_of(loop, ordinal, chat=chat))
        assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.0, None)
        assert (episode.finish_reason, episode.metrics["terminated"]) == ("stop", 1.0)
        assert episode.metrics["invalid_actions"] == 0


def test_a_group_shares_its_world_and_a_row_may_say_which() -> None:
    loop = loop_of(env=HOUSE, max_turns=1)

    def world(ordinal: int, **extra: Any) -> str:
        return heard(play(loop, ["look"], prompt=prompt_of(loop, ordinal, chat=False, **extra)))

    assert world(5) == world(5) == world(9, seed=5) == world(5, seed=None) != world(6)


def test_a_discrete_action_is_the_last_name_in_the_text() -> None:
    """The policy reads the rendering of Gymnasium's own FrozenLake."""
    args = {"render_mode": "ansi", "is_slippery": False}
    loop = loop_of(env="FrozenLake-v1", env_args=args, actions=LAKE, max_turns=6)
    lines = ["Not left: down", "DOWN", "right.", "right", "down", "I go right"]
    episode = play(loop, lines, prompt=prompt_of(loop, chat=False))
    assert episode.result is not None and episode.result.reward == 1.0
    assert "(Down)\nSFFF" in heard(episode)


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        ({"env": HOUSE, "chat": True}, ["go north", "open", "go south"]),
        ({"env": "FrozenLake-v1", "env_args": {"is_slippery": False, "render_mode": "ansi"}}, ["1", "right", "2"]),
        ({"env": "FrozenLake-v1", "actions": LAKE, "env_args": {"is_slippery": False}}, ["down", "4", "right"]),
        ({"env": "CounterIn-v0"}, ["1", "2", "3"]),
    ],
)
def test_an_episode_in_a_process_is_the_same(args: dict[str, Any], lines: list[str]) -> None:
    """Also of an environment that only the agent worker has registered."""
    gymnasium.register("CounterIn-v0", f"{__name__}:Counter", max_episode_steps=3)

    def episode() -> Episode:
        loop = agent_loop(TOKENIZER, max_turns=3, **args)
        return play(loop, lines, prompt=prompt_of(loop, chat=bool(args.get("chat"))))

    try:
        played = played_in_both_places(episode, Counter.events)
    finally:
        del gymnasium.registry["CounterIn-v0"]
    assert played.result is not None and played.result.error is None
    assert "step" not in str(Counter.events), "all of it is elsewhere"


def test_rewards_add_up_until_it_is_terminated_or_truncated() -> None:
    loop = loop_of(env="Counter-v0", chat=True)
    terminated = play(loop, ["I say 2", "2"])
    assert terminated.result is not None and terminated.result.reward == 2.0
    assert [turn.reward for turn in only(terminated).turn_rewards] == [1.0, 1.0]
    assert '<|im_start|>user\n{"sum": 2}<|im_end|>' in heard(terminated)
    truncated = play(loop, ["1", "2", "4", "5"])
    assert truncated.result is not None and truncated.result.reward == 3.5
    assert (truncated.finish_reason, truncated.metrics["truncated"], truncated.metrics["turns"]) == ("stop", 1.0, 3)
    assert terminated.metrics["truncated"] == 0.0


def test_an_invalid_action_is_answered_with_a_hint_and_counted() -> None:
    episode = play(loop_of(env="Counter-v0", chat=True, max_turns=3), ["7", "none", "3"])
    assert heard(episode).count("Invalid action: say a number of Discrete(5, start=1)") == 2
    assert episode.metrics["invalid_actions"] == 2
    assert episode.result is not None and episode.result.reward == 1.5
    nothing = play(loop_of(env="Counter-v0", chat=True, max_turns=1), ["nothing"])
    assert nothing.result is not None and nothing.result.reward == 0.0, "rollout.reward does not score it"


def test_reasoning_is_no_action() -> None:
    loop = loop_of(env="Counter-v0", chat=True, max_turns=1)
    episode = play(loop, ["<think>5?</think>3"])
    assert episode.result is not None and episode.result.reward == 1.5


def test_codecs_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "codecs_of_mine", module)
    loop = loop_of(env="Counter-v0", observe="codecs_of_mine:in_words", act="codecs_of_mine:by_length", max_turns=2)
    episode = play(loop, ["", "aaa"], prompt=prompt_of(loop, chat=False))
    assert "\nthe sum is 0\n" in heard(episode) and "\nInvalid action: say something\n" in heard(episode)
    assert episode.result is not None and episode.result.reward == 1.5


def in_words(observation: Any) -> str:
    return f"the sum is {observation['sum']}"


def by_length(text: str) -> int:
    if not text:
        raise ValueError("say something")
    return len(text)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_an_environment_that_fails_is_not_a_reward_of_0() -> None:
    episode = play(loop_of(env="Counter-v0", env_args={"error": "no disk"}, chat=True), ["1"])
    assert error_of(episode) == "OSError: no disk"
    assert Counter.events[-2:] == ["reset 0", "close"]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"env": "NoSuch-v0"}, r"agent_args.env=NoSuch-v0, env_args={}: cannot be made: \w+: .*NoSuch"),
        ({"env": "no_such_module:Maze-v0"}, "agent_args.env=no_such_module:Maze-v0: no_such_module cannot be imported"),
        ({"env": HOUSE, "env_args": {"width": 9}}, "width=9, height=3: must make 3 to 16 rooms"),
        ({"env": "CartPole-v1", "actions": ["left"]}, r"agent_args.actions=\['left'\]: must be the names of 2 actions"),
        ({"env": "Pendulum-v1"}, r"agent_args.act=null: actions are Box\(.*, which needs package.module:function"),
        (
            {"env": HOUSE, "max_turn": 3},
            "agent_args.max_turn=3: is no argument; allowed: chat, max_observation",
        ),
        ({"env": HOUSE, "stop": "</a>"}, "agent_args.stop=</a>: must be a list of texts"),
        ({"env": HOUSE, "act": "json:no_such"}, "rollout.agent_args.act=json:no_such: json has no no_such"),
    ],
)
def test_what_is_wrong_is_said_before_there_are_episodes(args: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load_agent_loop("rollout.environments.gymnasium:agent_loop", TOKENIZER, args)


def test_without_gymnasium_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match="gymnasium cannot be imported .*: pip install gymnasium"):
        loop_of(env=HOUSE)


# -- texts and actions -------------------------------------------------------------------------------------------------


def test_actions_of_a_text_space_are_texts() -> None:
    act = act_in(spaces.Text(5, charset="abc "))
    assert act("a b") == "a b"
    for text, error in [("", "0 characters, and may have 1 to 5"), ("aaaaaa", "6 characters"), ("ad!", "'!d'")]:
        with pytest.raises(ValueError, match=error):
            act(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("go", 1), ("go north", 2), ("First go north, then GO.", 1), ("go northwards", 1), ("stay 2", 0)],
)
def test_the_last_whole_name_counts(text: str, number: int) -> None:
    assert act_in(spaces.Discrete(3), ["stay", "go", "go north"])(text) == number


@pytest.mark.parametrize("text", ["", "6", "-1", "0", "2 or 9"])
def test_a_number_that_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="say a number of"):
        act_in(spaces.Discrete(5, start=1))(text)


def test_observations_are_texts() -> None:
    assert as_text("as it is") == "as it is"
    assert as_text({"position": np.array([1, 2]), "speed": np.float32(0.5)}) == '{"position": [1, 2], "speed": 0.5}'
    assert as_text(np.int64(14)) == "14"
