"""Environments of verifiers before 0.4: what `load_environment(**args)` of a module makes, with `rollout` and a
`rubric`."""

import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from numbers import Real
from typing import Any

from rollout.environments.optional import RolloutError, optional, with_causes
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import described
from rollout.sessions.harness import HarnessTask

SPLITS = ("train", "eval")
EMPTY_ANSWER = "EmptyModelResponseError"
"""The name that verifiers has for an answer without text and without calls. It is the policy's answer, and no
failure."""
_failures: ContextVar[list[Exception] | None] = ContextVar("failures", default=None)
"""The errors that reward functions have raised in this episode."""
_watches: set[Callable[..., Any]] = set()


class LegacyEnvironment:
    def __init__(self, env: str, args: Mapping[str, Any]):
        """Raises ValueError for one that cannot be loaded, or that scores groups, of which an episode is only one
        part."""
        self._name, self._package = env, optional("verifiers", "verifiers")
        try:
            with _signals_kept():
                self._environment = self._package.load_environment(env, **args)
        except Exception as error:
            raise ValueError(f"rollout.agent_args.env={env}: cannot be loaded: {with_causes(error)}") from error
        if self._environment.requires_group_rollouts:
            raise ValueError(f"rollout.agent_args.env={env}: its rubric compares the rollouts of a group")
        _watch(self._environment.rubric)

    async def run(self, task: HarnessTask, row: Mapping[str, Any] | None, client: Any) -> RewardResult | None:
        """Play one rollout. Raises RolloutError where the environment or a function of its rubric failed: verifiers
        would count 0."""
        environment, failures = self._environment, list[Exception]()
        _failures.set(failures)
        start = row or {
            "prompt": [{"role": "user", "content": task.prompt}],
            "answer": task.ground_truth,
            "info": task.extra.get("info") or {},
            "example_id": task.ordinal,
        }
        state = await environment.rollout(dict(start), self._package.OpenAIChatCompletionsClient(client), "policy", {})
        if (error := state["error"]) is not None and type(error).__name__ != EMPTY_ANSWER:
            raise RolloutError(f"the environment {self._name} failed: {with_causes(error)}") from error
        if not environment.score_rollouts:
            return None
        try:
            await environment.rubric.score_rollout(state)
        finally:
            await environment.rubric.cleanup(state)
        if failures:
            raise RolloutError(f"the rubric of {self._name} failed: {described(failures[0])}") from failures[0]
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items() if isinstance(value, Real)}
        return RewardResult(reward=float(state["reward"]), metrics=metrics | {"empty_answer": float(error is not None)})

    def rows(self, split: str) -> list[tuple[Any, str, Mapping[str, Any]]]:
        if split not in SPLITS:
            raise ValueError(f"data.train_files={self._name}@{split}: the splits are {', '.join(SPLITS)}")
        environment = self._environment
        data = environment.get_eval_dataset() if split == "eval" else environment.get_dataset()
        return [(row["prompt"], _answer(row), row) for row in data.to_list()]


def _answer(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    return "" if answer is None else str(answer)  # 0 is an answer


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Every environment of verifiers sets handlers for SIGINT and SIGTERM, in place of the run's own; in any thread but
    the main one, it fails at that. While this is open, nothing sets a handler."""
    original = signal.signal
    signal.signal = lambda signalnum, handler: signal.getsignal(signalnum)
    try:
        yield
    finally:
        signal.signal = original


def _watch(rubric: Any) -> None:
    """Record in `_failures` what the functions of a rubric raise, which verifiers logs and counts as 0."""
    rubric.funcs[:] = [_watched(function) for function in rubric.funcs]
    known = vars(rubric)
    inner_rubrics = [environment.rubric for environment in known.get("env_map", {}).values()]
    for part in (*known.get("rubrics", ()), *inner_rubrics):
        _watch(part)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    if function in _watches:
        return function

    @wraps(function)
    async def watched(*arguments: Any, **named: Any) -> float:
        try:
            outcome = function(*arguments, **named)
            return float(await outcome if inspect.isawaitable(outcome) else outcome)
        except Exception as error:
            failures = _failures.get()
            if failures is not None:
                failures.append(error)
            raise

    _watches.add(watched)
    return watched
