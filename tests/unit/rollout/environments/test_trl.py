"""Environment classes in TRL's form: what becomes a tool, when the reward is read, and what goes wrong."""

import sys
import threading
import time
from typing import Any

import pytest

from configs.rollout import RolloutConfig, ToolPlace
from rollout.agents.loop import load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tool_processes import make_processes, tools_in
from rollout.environments.trl import agent_loop, row_for
from tests.support.environments import TOKENIZER, call, error_of, heard, play, played_in_both_places, prompt_of
from tests.support.sequences import only


class Guess:
    """A class like one of TRL's documentation: it holds a state, and tells its end by an exception."""

    events: list[str] = []

    def __init__(self, most: int = 9):
        self.most = most
        self._pay(0.0)

    def reset(self, secret: int = 4, **row: Any) -> str | None:
        self.events.append(f"reset {secret} {sorted(row)}")
        self.secret, self.done = secret, False
        return f"A number up to {self.most}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        if self.done:
            raise ValueError("Game over.")
        self.events.append(f"guess {number} {threading.current_thread() is threading.main_thread()}")
        self.done = number == self.secret
        self._pay(1.0 if self.done else 0.25)
        return "Right." if self.done else "Higher." if number < self.secret else "Lower."

    async def hint(self) -> str:
        """Ask whether it is even."""
        return "even" if self.secret % 2 == 0 else "odd"

    def _pay(self, reward: float) -> None:
        self.reward = reward

    @property
    def state(self) -> str:
        raise RuntimeError("nobody asks for it")

    def close(self) -> None:
        self.events.append("close")


class Scored(Guess):
    """A class whose reward is a method."""

    def _pay(self, reward: float) -> None: ...

    def get_reward(self) -> float | None:
        self.events.append("get_reward")
        return None if self.secret < 0 else 1.0 + self.done


class Unscored:
    def reset(self) -> None: ...

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return f"{seconds}"


class WrongReset(Unscored):
    def reset(self) -> Any:
        return 4


class NoNumber(Unscored):
    reward = "much"


class NoTools:
    def reset(self) -> None: ...


class NoReset:
    def guess(self, number: int) -> str: ...


class NoType:
    def reset(self) -> None: ...

    def guess(self, number) -> str: ...  # pyright: ignore[reportMissingParameterType]


@pytest.fixture(autouse=True)
def as_a_module_of_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "classes_of_mine", sys.modules[__name__])
    Guess.events.clear()


def loop_of(kind: type, **args: Any) -> MultiTurn:
    return agent_loop(TOKENIZER, factory=f"classes_of_mine:{kind.__name__}", **args)


def test_public_methods_are_tools() -> None:
    guess, hint = loop_of(Guess).prompt_tools
    assert (guess.name, guess.description) == ("guess", "Guess the number.")
    assert guess.parameters["properties"] == {"number": {"description": "Your guess.", "type": "integer"}}
    assert (hint.name, hint.parameters["properties"]) == ("hint", {})


def test_an_episode() -> None:
    loop = loop_of(Guess, args={"most": 20})
    lines = [call("guess", number=3), call("hint") + call("guess", number=8), "It is 8."]
    episode = play(loop, lines, prompt=prompt_of(loop, secret=8, level="easy"))
    said = heard(episode)
    places = [said.index(text) for text in ("A number up to 20.", "Higher.", "even", "Right.", "It is 8.")]
    assert places == sorted(places)
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.0, None)
    assert [turn.reward for turn in only(episode).turn_rewards] == [0.25, 0.75, 0.0], "what each turn has gained"
    assert (episode.metrics["tool_calls"], episode.metrics["tool_errors"], episode.metrics["turns"]) == (3, 0, 3)
    columns = ["answer", "ground_truth", "level", "prompt"]
    assert Guess.events == [f"reset 8 {columns}", "guess 3 False", "guess 8 False", "close"]


class Stuck(Guess):
    def guess(self, number: int) -> str:
        """Raise 9 to a power, which holds Python's global lock for hours."""
        return str(9**number)


@pytest.mark.slow
def test_an_episode_in_a_process_is_the_same() -> None:
    loop = loop_of(Guess, args={"most": 20})
    lines = [call("guess", number=3), call("hint") + call("guess", number=8), "It is 8."]
    prompt = prompt_of(loop, secret=8, level="easy")
    played_in_both_places(lambda: play(loop, lines, prompt=prompt), Guess.events)
    with tools_in(make_processes(RolloutConfig(tools_run_in=ToolPlace.process))):
        stuck = play(loop_of(Stuck, step_timeout_s=2.0, call_timeout_s=1.0), [call("guess", number=10**8)])
    assert Guess.events == [], "all of it is elsewhere"
    assert "took longer than step_timeout_s=2.0; its process was killed" in error_of(stuck)


def test_calls_of_a_turn_run_one_after_another() -> None:
    loop = loop_of(Unscored)
    began = time.monotonic()
    episode = play(loop, [call("wait", seconds=0.2) + call("wait", seconds=0.1), "done"])
    assert time.monotonic() - began >= 0.3
    assert heard(episode).index("0.2\n</tool_response>") < heard(episode).index("0.1\n</tool_response>")
    assert episode.result is None, "rollout.reward scores it"


@pytest.mark.parametrize(
    ("lines", "max_turns", "reward"),
    [
        (["I give up."], 4, 1.0),
        ([call("guess", number=4), "done"], 4, 2.0),
        ([call("guess", number=4)], 1, 2.0),
    ],
)
def test_a_method_is_asked_for_the_reward_after_the_last_turn(lines: list[str], max_turns: int, reward: float) -> None:
    episode = play(loop_of(Scored, max_turns=max_turns), lines)
    assert episode.result is not None and episode.result.reward == reward
    assert Guess.events.count("get_reward") == 1


def test_a_reward_of_none_is_left_to_the_reward_function() -> None:
    loop = loop_of(Scored)
    assert play(loop, ["done"], prompt=prompt_of(loop, secret=-1)).result is None


def test_a_reset_gets_the_columns_that_it_names() -> None:
    prompt = prompt_of(loop_of(Guess), level="easy", secret=3)
    assert row_for(lambda level, other=1: None, prompt) == {"level": "easy"}
    assert row_for(lambda **row: None, prompt) == {
        **{"prompt": prompt.text, "answer": "42", "ground_truth": "42"},
        **{"level": "easy", "secret": 3},
    }


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (WrongReset, "TypeError: reset returned 4, and neither a text nor None"),
        (NoNumber, "ValueError: could not convert string to float: 'much'"),
    ],
)
def test_an_environment_that_fails_is_not_a_reward_of_0(kind: type, error: str) -> None:
    assert error_of(play(loop_of(kind), ["done"])) == error


@pytest.mark.parametrize(
    ("kind", "args", "error"),
    [
        (NoTools, {}, "agent_args.factory=classes_of_mine:NoTools: NoTools needs a method reset, and others"),
        (NoReset, {}, "agent_args.factory=classes_of_mine:NoReset: NoReset needs a method reset"),
        (NoType, {}, "tool guess: parameter number has no type"),
        (Guess, {"args": {"least": 1}}, r"agent_args.factory=classes_of_mine:Guess: must be callable with \(least="),
        (Guess, {"call_timeout_s": 60.0}, "call_timeout_s=60.0: must be a number above 0, and below step_timeout_s=60"),
        (Guess, {"max_output_chars": 0}, "agent_args.max_output_chars=0: must be a whole number, at least 1"),
    ],
)
def test_what_is_wrong_is_said_before_there_are_episodes(kind: type, args: dict[str, Any], error: str) -> None:
    agent_args = {"factory": f"classes_of_mine:{kind.__name__}", **args}
    with pytest.raises(ValueError, match=error):
        load_agent_loop("rollout.environments.trl:agent_loop", TOKENIZER, agent_args)
