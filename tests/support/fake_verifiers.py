"""The part of the package verifiers (0.3) that rollout.environments.verifiers uses, where it is not installed.

It has the bad habits of the real one: it takes over the handlers of signals, and a function of a rubric that raises
counts 0.
"""

import importlib
import inspect
import signal
from collections.abc import Callable
from typing import Any

__version__ = "0.3.1"


class Error(Exception):
    pass


class EmptyModelResponseError(Error):
    pass


class Rubric:
    def __init__(self, funcs: list[Callable[..., Any]], weights: list[float]):
        self.funcs, self.weights = funcs, weights

    async def score_rollout(self, state: dict[str, Any]) -> None:
        scores: dict[str, float] = {}
        for function in self.funcs:
            given = {name: state[name] for name in inspect.signature(function).parameters}
            try:
                score = function(**given)
                scores[function.__name__] = float(await score if inspect.isawaitable(score) else score)
            except Exception:
                scores[function.__name__] = 0.0
        state["metrics"] = scores
        state["reward"] = sum(score * weight for score, weight in zip(scores.values(), self.weights, strict=True))

    async def cleanup(self, state: dict[str, Any]) -> None:
        state["cleaned"] = True


class MultiTurnEnv:
    def __init__(self, *, dataset: Any, eval_dataset: Any, rubric: Rubric, max_turns: int, score_rollouts: bool = True):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._data, self._held_out, self._max_turns = dataset, eval_dataset, max_turns
        self.rubric, self.score_rollouts = rubric, score_rollouts

    @property
    def requires_group_rollouts(self) -> bool:
        return any("completions" in inspect.signature(one).parameters for one in self.rubric.funcs)

    def get_dataset(self) -> Any:
        return self._data

    def get_eval_dataset(self) -> Any:
        return self._held_out

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> list[Any]:
        raise NotImplementedError

    async def rollout(self, input: dict[str, Any], client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        state: dict[str, Any] = {**input, "completion": [], "error": None, "reward": None, "metrics": None}
        for turn in range(self._max_turns):
            try:
                if turn:
                    state["completion"] += await self.env_response(state["completion"], state)
                asked = [*state["prompt"], *state["completion"]]
                answer = await client.client.chat.completions.create(model=model, messages=asked)
                said = answer.choices[0].message.content
                if not said:
                    raise EmptyModelResponseError
                state["completion"].append({"role": "assistant", "content": said})
            except Error as error:
                state["error"] = error
                break
        return state


class OpenAIChatCompletionsClient:
    def __init__(self, client: Any):
        self.client = client


def load_environment(env_id: str, **arguments: Any) -> Any:
    return importlib.import_module(env_id.replace("-", "_")).load_environment(**arguments)
