"""Environments of the package `verifiers` (PrimeIntellect-ai/verifiers) as harnesses: each asks the policy itself, over
the session of its episode, and its rubric gives the reward.

rollout.agent=rollout.environments.verifiers:agent rollout.agent_args.env=my_env
data.loader=rollout.environments.verifiers:rows data.train_files=my_env@train data.val_files=my_env@eval

Such an environment is what its module's `load_environment(**args)` makes, with `rollout` and a `rubric`: versions of
verifiers before 0.4.
"""

import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from numbers import Real
from types import ModuleType
from typing import Any

from configs.data import parse_source
from rollout.agents.threads import in_thread
from rollout.environments.optional import optional
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import described
from rollout.sessions.harness import HarnessTask

PACKAGE, LOAD = "verifiers<0.4", "load_environment"
ROW = "verifiers_row"
"""Column with the whole row of the environment's own data set."""
EMPTY_ANSWER = "EmptyModelResponseError"
"""What verifiers calls an answer without text and without calls. It is the policy's, and no failure."""
_loaded: dict[tuple[str, str], Any] = {}
_loading = threading.Lock()
_failures: ContextVar[list[Exception] | None] = ContextVar("failures", default=None)
"""What reward functions have raised in this episode."""
_watches: set[Callable[..., Any]] = set()


class RolloutError(RuntimeError):
    """The environment, or a function of its rubric, failed: the episode has no reward."""


async def agent(
    task: HarnessTask, client: Any, *, env: str, args: Mapping[str, Any] | None = None, load_timeout_s: float = 600.0
) -> RewardResult | None:
    """Run one rollout. Returns the rubric's reward and metrics; None, which leaves the reward to rollout.reward, for an
    environment that scores nothing.

    Args:
        task: a row of `rows`, or of any other data: then its prompt, ground truth and `info` make the input.
        client: an openai.AsyncOpenAI of the session.
        env: name of the environment, or of the installed module that has `load_environment`.
        args: keyword arguments of its load_environment.
        load_timeout_s: for the first episode in a process, which loads it.

    Raises:
        RolloutError: the environment or its rubric failed. verifiers itself would count that as reward 0.
        ImportError, ValueError: as `load` does.
    """
    given = dict(args or {})
    environment = _loaded.get(_key(env, given))
    if environment is None:
        loading = partial(load, env, given)
        environment = await in_thread(loading, load_timeout_s, "load_timeout_s", f"loading {env}")
    failures: list[Exception] = []
    _failures.set(failures)
    state = await environment.rollout(_input(task), _package().OpenAIChatCompletionsClient(client), "policy", {})
    if (error := state["error"]) is not None and type(error).__name__ != EMPTY_ANSWER:
        raise RolloutError(f"the environment {env} failed: {_whole(error)}") from error
    if not environment.score_rollouts:
        return None
    try:
        await environment.rubric.score_rollout(state)
    finally:
        await environment.rubric.cleanup(state)
    if failures:
        raise RolloutError(f"the rubric of {env} failed: {described(failures[0])}") from failures[0]
    metrics = {name: float(value) for name, value in (state["metrics"] or {}).items() if isinstance(value, Real)}
    return RewardResult(reward=float(state["reward"]), metrics=metrics | {"empty_answer": float(error is not None)})


def rows(entries: str) -> list[dict[str, Any]]:
    """The environment's own data set, for data.loader with data.prompt_key=prompt and data.answer_key=answer.

    `entries`: `name@train` or `name@eval`; where load_environment takes arguments, a JSON object such as
    {"env": "my_env", "args": {"size": 100}, "split": "eval"}.

    Raises:
        ValueError: it says no environment or no such split.
    """
    env, args, split = _asked(entries)
    environment = load(env, args)
    found = environment.get_eval_dataset() if split == "eval" else environment.get_dataset()
    return [
        {"prompt": row["prompt"], "answer": str(row.get("answer") or ""), "data_source": env, ROW: row}
        for row in found.to_list()
    ]


def load(env: str, args: Mapping[str, Any]) -> Any:
    """The environment, which is loaded once per process. Blocks.

    Raises:
        ImportError: verifiers is not installed, or is a version without load_environment.
        ValueError: the environment cannot be loaded, or it scores groups, of which an episode is only one part.
    """
    with _loading:
        key = _key(env, args)
        if key not in _loaded:
            package = _package()
            try:
                with _signals_kept():
                    environment = package.load_environment(env, **args)
            except Exception as error:
                raise ValueError(f"rollout.agent_args.env={env}: cannot be loaded: {_whole(error)}") from error
            if environment.requires_group_rollouts:
                raise ValueError(f"rollout.agent_args.env={env}: its rubric compares the rollouts of a group")
            _watch(environment.rubric)
            _loaded[key] = environment
        return _loaded[key]


def _key(env: str, args: Mapping[str, Any]) -> tuple[str, str]:
    return env, json.dumps(dict(args), sort_keys=True, default=str)


def _package() -> ModuleType:
    """Raises ImportError."""
    package = optional("verifiers", f"'{PACKAGE}'")
    if not hasattr(package, LOAD):
        version = package.__version__
        raise ImportError(f"verifiers {version} has no {LOAD} of a name: pip install '{PACKAGE}'")
    return package


def _input(task: HarnessTask) -> dict[str, Any]:
    """What a rollout begins with."""
    if ROW in task.extra:
        return dict(task.extra[ROW])
    return {
        "prompt": [{"role": "user", "content": task.prompt}],
        "answer": task.ground_truth,
        "info": task.extra.get("info") or {},
        "example_id": task.ordinal,
    }


def _asked(entries: str) -> tuple[str, dict[str, Any], str]:
    """Environment, its arguments, split."""
    if entries.lstrip().startswith("{"):
        said = json.loads(entries)
        unknown = sorted(set(said) - {"env", "args", "split"})
        if unknown or "env" not in said:
            raise ValueError(f"data.train_files={entries}: has keys {sorted(said)}; allowed: env, args, split")
        env, args, split = said["env"], dict(said.get("args", {})), said.get("split", "train")
    else:
        source = parse_source(entries.strip())
        env, args, split = source.name, {}, source.split or "train"
    if split not in ("train", "eval"):
        raise ValueError(f"data.train_files={entries}: an environment has the splits train and eval, and not {split}")
    return env, args, split


def _whole(error: BaseException) -> str:
    """An error with its causes: those of verifiers' own errors alone say what went wrong."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return ", because of ".join(map(described, causes))


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Every environment of verifiers sets handlers for SIGINT and SIGTERM, in place of the run's own; in any thread but
    the main one, it fails at that. While this is open, nothing sets a handler."""
    original = signal.signal
    signal.signal = lambda number, _: signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal = original


def _watch(rubric: Any) -> None:
    """Have `_failures` hear what the functions of a rubric raise: verifiers logs it and counts 0."""
    rubric.funcs[:] = [_watched(function) for function in rubric.funcs]
    known = vars(rubric)
    of_environments = [environment.rubric for environment in known.get("env_map", {}).values()]
    for part in (*known.get("rubrics", ()), *of_environments):
        _watch(part)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    if function in _watches:
        return function

    @wraps(function)
    async def watched(*given: Any, **named: Any) -> Any:
        try:
            outcome = function(*given, **named)
            return float(await outcome if inspect.isawaitable(outcome) else outcome)
        except Exception as error:
            failures = _failures.get()
            if failures is not None:
                failures.append(error)
            raise

    _watches.add(watched)
    return watched
