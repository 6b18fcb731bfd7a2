"""Environments of SkyRL-gym's protocol, as users write them, without the package."""

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, str]]


class Guess:
    """The number is the ground truth. Writes down what happens to it."""

    events: list[str] = []

    def __init__(self, env_config: Any, extras: Mapping[str, Any]):
        self._env_config, self._number = env_config, int(extras["reward_spec"]["ground_truth"])
        self._max_turns, self._level = extras["max_turns"], extras.get("level")
        self.turns = 0

    def init(self, prompt: Messages) -> tuple[Messages, Mapping[str, Any]]:
        self.events.append(f"init {prompt[0]['role']} {self._level} {self._max_turns}")
        first = self._env_config.get("first")
        return [*prompt, *([{"role": "user", "content": first}] if first else [])], {}

    def step(self, action: str) -> Mapping[str, Any]:
        self.events.append(f"step {action}")
        self.turns += 1
        is_right = str(self._number) in action
        said = [] if is_right else [{"role": "user", "content": "Higher."}]
        return {"observations": said, "reward": 1.0 if is_right else 0.25, "done": is_right, "metadata": {}}

    def close(self) -> None:
        self.events.append("close")

    def get_metrics(self) -> Mapping[str, Any]:
        return {"turns": self.turns, "level": self._level, "guesses": self.turns}


class Trims(Guess):
    """Reads no more of a turn than its first word."""

    def step(self, action: str) -> Mapping[str, Any]:
        return {**super().step(action), "postprocessed_action": action.partition(" ")[0]}


class Fails(Guess):
    def step(self, action: str) -> Mapping[str, Any]:
        raise OSError("the sandbox is gone")


class Rewrites(Guess):
    def init(self, prompt: Messages) -> tuple[Messages, Mapping[str, Any]]:
        return [{"role": "system", "content": "Be brief."}, *prompt], {}


class Forgets(Guess):
    def step(self, action: str) -> Mapping[str, Any]:
        return {"observations": [], "done": True}
